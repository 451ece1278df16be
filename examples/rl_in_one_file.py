"""The idea of Agent Lightning on one screen: record the tokens of an agent's model calls, credit them, train on them.

An agent is asked "lives Ana": it must call a tool ("city Ana"), read the fact that comes back ("red"), and answer
("answer red"). Every task draws its facts anew, and a quarter of the questions is never trained on. The policy first
imitates a demonstrator that mixes up the relations three times out of four; from then on only a reward of 0 or 1 speaks.

`python examples/rl_in_one_file.py [SEED]` takes 6 s on one CPU core. Held-out success over seeds 0 to 5, greedy and
sampled: .12 to .15 and .32 to .39 after imitation, 1.00 and .92 to .99 after 15 training steps.
"""

import random
import sys

import torch
from torch import nn

ASKS = {"lives": "city", "works": "job", "owns": "pet", "obeys": "boss"}  # word of the question -> the right relation
CONFUSED = {"city": "job", "job": "city", "pet": "boss", "boss": "pet"}
PEOPLE = ["Ana", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ivy", "Jon", "Kim", "Lea", "Max", "Ned", "Ola", "Pia"]
FACTS = ["red", "blue", "green", "white", "black", "brown", "pink", "grey"]
VOCAB = ["user:", "assistant:", "tool:", "answer", "none", *ASKS, *CONFUSED, *PEOPLE, *FACTS]
ID = {word: i for i, word in enumerate(VOCAB)}


class Policy(nn.Module):
    """A transformer: token ids (B, T) -> log-probabilities of each next token (B, T, V)."""

    def __init__(self, width=48):
        super().__init__()
        self.token, self.place = nn.Embedding(len(VOCAB), width), nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(VOCAB))

    def forward(self, ids_BT):
        length = ids_BT.shape[1]
        x_BTD = self.token(ids_BT) + self.place(torch.arange(length))
        return self.head(self.layers(x_BTD, mask=torch.ones(length, length).triu(1).bool())).log_softmax(-1)


@torch.no_grad()
def call(policy, prompts, greedy):
    """One model call for each prompt. What is recorded: prompt ids, sampled ids (always two), their log-probabilities."""
    ids, logprobs = torch.tensor(prompts), []
    for _ in range(2):
        logp_BV = policy(ids)[:, -1]
        new_B1 = logp_BV.argmax(-1, keepdim=True) if greedy else logp_BV.exp().multinomial(1)
        ids, logprobs = torch.cat([ids, new_B1], 1), [*logprobs, logp_BV.gather(1, new_B1)]
    return list(zip(prompts, ids[:, -2:].tolist(), torch.cat(logprobs, 1).tolist(), strict=True))


def run_agents(policy, tasks, greedy=False):
    """Rollouts, side by side: the recorded calls of each task's agent, and its reward."""
    first = call(policy, [[ID[w] for w in ("user:", ask, person, "assistant:")] for ask, person, _ in tasks], greedy)
    prompts = []
    for (_, person, facts), (prompt, sampled, _) in zip(tasks, first, strict=True):
        relation, whom = (VOCAB[i] for i in sampled)
        fact = facts.get(relation, "none") if whom == person else "none"
        # The next prompt begins with the very ids that were sampled, not with text that is tokenized once more.
        prompts.append(prompt + sampled + [ID["tool:"], ID[fact], ID["assistant:"]])
    second = call(policy, prompts, greedy)
    right = [[ID["answer"], ID[facts[ASKS[ask]]]] for ask, _, facts in tasks]
    return [([a, b], float(b[1] == answer)) for a, b, answer in zip(first, second, right, strict=True)]


def merge(calls):
    """The calls of one rollout as one sequence: every token once, and a mask that says which ones the policy wrote."""
    tokens, mask, logprobs = [], [], []
    for prompt, sampled, sampled_logprobs in calls:
        assert prompt[: len(tokens)] == tokens, "the prompt does not continue what was read and written before"
        news = prompt[len(tokens) :]
        tokens, mask = tokens + news + sampled, mask + [0.0] * len(news) + [1.0] * len(sampled)
        logprobs += [0.0] * len(news) + sampled_logprobs
    return tokens, mask, logprobs


def update(optimizer, policy, rollouts, advantages, imitate=False):
    """One step on the clipped loss, the mean over sampled tokens. Every call of a rollout gets the rollout's advantage."""
    tokens_BT, mask_BT, old_BT = (torch.tensor(column) for column in zip(*map(merge, rollouts), strict=True))
    logp_BT = policy(tokens_BT[:, :-1]).gather(2, tokens_BT[:, 1:, None])[..., 0]
    ratio_BT = (logp_BT - (logp_BT.detach() if imitate else old_BT[:, 1:])).exp()
    advantage_B1 = torch.tensor(advantages)[:, None]
    gain_BT = torch.min(ratio_BT * advantage_B1, ratio_BT.clamp(0.8, 1.28) * advantage_B1) * mask_BT[:, 1:]
    optimizer.zero_grad()
    (-gain_BT.sum() / mask_BT.sum()).backward()
    optimizer.step()


def demonstrate(ask, person, facts):
    """The calls of the flawed demonstrator: it knows the protocol, but mostly looks up the wrong relation."""
    relation = ASKS[ask] if random.random() < 0.25 else CONFUSED[ASKS[ask]]
    fact = facts[relation]
    words = f"user: {ask} {person} assistant: {relation} {person} tool: {fact} assistant: answer {fact}"
    ids = [ID[word] for word in words.split()]
    return [(ids[:4], ids[4:6], [0.0, 0.0]), (ids[:9], ids[9:], [0.0, 0.0])]


def main(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the model is too small for two
    questions = random.sample([(ask, person) for ask in ASKS for person in PEOPLE], 64)
    held_out, train = questions[:16], questions[16:]

    def tasks(source, count):
        return [
            (*random.choice(source), {relation: random.choice(FACTS) for relation in CONFUSED}) for _ in range(count)
        ]

    def report(when):
        greedy, sampled = (run_agents(policy, tasks(held_out, 400), greedy) for greedy in (True, False))
        shares = [sum(reward for _, reward in rollouts) / 400 for rollouts in (greedy, sampled)]
        print("{}: held-out success {:.3f} greedy, {:.3f} sampled".format(when, *shares), flush=True)

    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(200):  # imitating is the same update: every demonstration is as good as the others
        update(optimizer, policy, [demonstrate(*task) for task in tasks(train, 64)], [1.0] * 64, imitate=True)
    report("imitation")

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for step in range(1, 16):
        # Eight rollouts of each task are compared: better than the others of the group is good, worse is bad.
        calls, rewards = zip(*run_agents(policy, [task for task in tasks(train, 32) for _ in range(8)]), strict=True)
        rewards_GK = torch.tensor(rewards).view(32, 8)
        advantages_GK = (rewards_GK - rewards_GK.mean(1, keepdim=True)) / (rewards_GK.std(1, keepdim=True) + 1e-4)
        for part in range(0, 256, 64):
            update(optimizer, policy, calls[part : part + 64], advantages_GK.flatten()[part : part + 64].tolist())
        if step % 3 == 0:
            report(f"step {step:2}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
