"""Noise is a function of seed and position, and draws follow the distribution they report."""

from __future__ import annotations

import numpy as np
import torch

from agentlightning.engines.local.decoding import draw, nucleus, stream, uniforms


def noise(seed: int, positions: range) -> np.ndarray:
    streams = np.full(len(positions), stream(seed), dtype=np.uint64)
    return uniforms(streams, np.array(positions, dtype=np.int64))


def test_noise_is_the_published_splitmix64_read_at_a_counter() -> None:
    state = stream(0)
    expected = []
    for _ in range(4):  # the reference: a state that advances by the golden gamma
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    np.testing.assert_allclose(noise(0, range(4)), expected, rtol=1e-15)


def test_draws_have_the_frequencies_of_the_softmax_at_their_temperature() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20000
    for temperature in (1.0, 0.5):
        tokens, logprobs = draw_many(logits, n, temperature, 1.0)
        expected = torch.log_softmax(logits / temperature, -1)
        torch.testing.assert_close(logprobs, expected[tokens])
        found = torch.bincount(tokens, minlength=4) / n
        assert float((found - expected.exp()).abs().max()) < 0.012


def test_a_nucleus_is_that_of_all_tokens_in_order_and_of_equally_likely_ones_the_first() -> None:
    torch.manual_seed(0)
    logits_BV = (
        (torch.randn(40, 3000) * torch.linspace(0.1, 4, 40)[:, None]).bfloat16().float()
    )  # of 16 bits: many equal
    top_ps_B = torch.tensor([0.1, 0.5, 0.9, 0.99, 0.9999, 0.9999999]).repeat(7)[:40]
    logprobs_BV = logits_BV.log_softmax(-1)
    for found_V, logprobs_V, top_p in zip(nucleus(logprobs_BV, top_ps_B), logprobs_BV, top_ps_B.tolist(), strict=True):
        mass, inside = 0.0, []
        for token in sorted(range(3000), key=lambda token, of=logprobs_V.tolist(): -of[token]):
            if inside and mass >= top_p:
                break
            inside.append(token)
            mass += float(logprobs_V[token].exp())
        assert set(inside) == set((found_V > -torch.inf).nonzero()[:, 0].tolist())
        torch.testing.assert_close(found_V[inside], logprobs_V[inside] - np.log(mass), atol=1e-5, rtol=1e-5)


def test_temperature_zero_takes_the_largest_logit_and_reports_the_plain_log_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.99, 0.0]).double(), torch.tensor([0.0, 1.0]), torch.ones(2))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits[0], -1)[[1, 0]])


def draw_many(logits: torch.Tensor, n: int, temperature: float, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    noise_n = torch.from_numpy(noise(3, range(n)))
    return draw(logits.expand(n, -1), noise_n, torch.full((n,), temperature), torch.full((n,), top_p))


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(3, 3)
    extremes = torch.tensor([0.0, 0.5, 1 - 2**-52], dtype=torch.float64)
    assert draw(logits, extremes, torch.ones(3), torch.ones(3))[0].tolist() == [1, 1, 1]
