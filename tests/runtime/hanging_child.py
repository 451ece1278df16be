"""A child for test_watchdog.py: ``python -m hanging_child beats|idles|stalls|silent``, until it is killed."""

import sys
import threading

from agentlightning.runtime.watchdog import beat_to_parent

if sys.argv[1] != "silent":
    heartbeat = beat_to_parent()
    heartbeat.working = sys.argv[1] != "idles"
    while sys.argv[1] == "beats":
        heartbeat.progress()
        threading.Event().wait(0.01)
print("ready", flush=True)
threading.Event().wait()
