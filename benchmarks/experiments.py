"""The three examples on a pretrained model: does it learn from reward, with each agent's framework as shipped?

    python benchmarks/experiments.py --example calculator|text_to_sql|rag [--model smollm2] [--seeds 3] [--quick] …

The claim EXAMPLE-smollm2 of learning.py, whose other options and last line it has; with --model tiny the example's largest
slice for a model that is made on the spot. Finished arms are kept in runs/learning, and a run that was cut goes on.
"""

from __future__ import annotations

import argparse

from learning import main

TINY = {"calculator": "calculator-all", "text_to_sql": "text_to_sql-spider", "rag": "rag-2wiki"}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=tuple(TINY), required=True)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    given, more = parser.parse_known_args()
    main(["--claim", f"{given.example}-smollm2" if given.model == "smollm2" else TINY[given.example], *more])
