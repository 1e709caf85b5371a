"""The same with texts: a query is the mean of eight questions of one, two or four intents of
Banking77, and asks for questions of the intent of a ninth one.

    python benchmarks/studies/recommendation/profiles.py --data FOLDER
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import banking77
from benchmarks.studies.cells import packed
from benchmarks.studies.models import static_model
from torch import Tensor, nn

import st_magnitude as stm

CELLS = Path(__file__).parent / "profiles.jsonl"
SIZE, BATCH, STEPS, EVERY = 8, 256, 200, 20
KINDS = ("cosine", "dnorm", "row")
TAUS = (0.02, 0.05, 0.1, 0.2, 0.4)
RATES = (0.01,)


class Part:
    """The questions of a split as rows of tokens, and draws of profiles from them."""

    def __init__(self, questions: list[tuple[str, str]], number: dict[str, int]) -> None:
        self.texts = [text for text, _ in questions]
        self.intents = torch.tensor([number[intent] for _, intent in questions])
        self.members = [torch.nonzero(self.intents == i).flatten() for i in range(len(number))]

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Questions of n profiles, (n, SIZE), and a further one of each, (n,)."""
        rows = []
        for _ in range(n):
            intents = rng.choice(len(self.members), rng.choice([1, 2, 4]), replace=False)
            of = np.resize(intents, SIZE + 1)
            of[-1] = rng.choice(intents)
            drawn = {i: rng.permutation(self.members[i].numpy()).tolist() for i in intents}
            rows.append([drawn[i].pop() for i in of])
        found = torch.tensor(rows)
        return found[:, :-1], found[:, -1]


class Texts(nn.Module):
    """The mean of token vectors, whose mean length is 1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        table = static_model()[0]
        self.tokenizer = table.tokenizer
        self.table = nn.EmbeddingBag.from_pretrained(table.embedding.weight.detach(), freeze=False)

    def tokens(self, part: Part) -> None:
        encoded = self.tokenizer.encode_batch(part.texts, add_special_tokens=False)
        part.tokens = [torch.tensor(x.ids) for x in encoded]

    def keep(self, parts: list[Part]) -> None:
        """Leaves out of the table what no text has."""
        for part in parts:
            self.tokens(part)
        used = torch.cat([x for part in parts for x in part.tokens]).unique()
        for part in parts:
            part.tokens = [torch.searchsorted(used, x) for x in part.tokens]
        self.table = nn.EmbeddingBag.from_pretrained(self.table.weight[used].detach(), freeze=False)
        with torch.no_grad():
            self.table.weight /= self(parts[0], torch.arange(1000)).norm(dim=1).mean()

    def forward(self, part: Part, rows: Tensor) -> Tensor:
        chosen = [part.tokens[i] for i in rows.tolist()]
        starts = torch.tensor([0, *(len(x) for x in chosen[:-1])]).cumsum(0)
        return self.table(torch.cat(chosen), starts)

    def queries(self, part: Part, profiles: Tensor, kind: str) -> Tensor:
        texts = self(part, profiles.flatten())
        texts = stm.COSINE.document(texts) if kind == "row" else texts
        return texts.view(*profiles.shape, -1).mean(dim=1)


@torch.no_grad()
def ndcg(model: Texts, part: Part, profiles: Tensor, targets: Tensor, kind: str) -> np.ndarray:
    """nDCG@10 over the questions of the part, without those of the profile."""
    documents = model(part, torch.arange(len(part.texts)))
    scores = stm.COSINE(model.queries(part, profiles, kind), documents)
    top = scores.scatter(1, profiles, -torch.inf).topk(10).indices
    gains = (part.intents[top] == part.intents[targets][:, None]).double()
    discounts = 1 / torch.arange(2, 12).double().log2()
    wanted = part.intents[targets][:, None]
    left = (part.intents == wanted).sum(dim=1) - (part.intents[profiles] == wanted).sum(dim=1)
    return (gains @ discounts / discounts.cumsum(0)[left.clamp(max=10) - 1]).numpy()


def measure(kind: str, tau: float, rate: float, seed: int, folder: Path) -> dict:
    torch.manual_seed(seed)
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    questions = banking77.read(folder, "train")
    number = {x: i for i, x in enumerate(sorted({intent for _, intent in questions}))}
    order = np.random.default_rng(0).permutation(len(questions))
    train, dev = (Part([questions[i] for i in x], number) for x in (order[4000:], order[:4000]))
    test = Part(banking77.read(folder, "test"), number)
    model = Texts()
    model.keep([train, dev, test])
    drawn = {part: part.draw(1000, fixed) for part in (dev, test)}
    similarity = stm.COSINE if kind == "cosine" else stm.DNORM
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    curve, best = [float(ndcg(model, dev, *drawn[dev], kind).mean())], None
    for step in range(1, STEPS + 1):
        profiles, targets = train.draw(BATCH, rng)
        queries, documents = model.queries(train, profiles, kind), model(train, targets)
        terms = [stm.Term(temperature=tau)]
        loss = stm.infonce(queries, documents, terms, similarity, exclude=train.intents[targets])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY == 0:
            curve.append(round(float(ndcg(model, dev, *drawn[dev], kind).mean()), 5))
            if curve[-1] == max(curve):
                best = {name: x.clone() for name, x in model.state_dict().items()}
    if best:
        model.load_state_dict(best)
    figures = {"kind": kind, "tau": tau, "rate": rate, "seed": seed, "dev": max(curve)}
    figures["untrained"] = round(curve[0], 5)
    figures["step"] = EVERY * int(np.argmax(curve))
    return figures | {"test": packed(ndcg(model, test, *drawn[test], kind))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = {}
    if CELLS.is_file():
        lines = map(json.loads, CELLS.read_text(encoding="utf-8").splitlines())
        known = {(x["kind"], x["tau"], x["rate"], x["seed"]): x for x in lines}
    cells = [(*x, 0) for x in product(KINDS, TAUS, RATES)]
    for seed in range(given.seeds):
        for cell in cells:
            if cell in known:
                continue
            known[cell] = measure(*cell, given.data)
            with CELLS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(known[cell], separators=(",", ":")) + "\n")
            print(known[cell]["dev"], known[cell]["untrained"], *cell, flush=True)
        bests = [
            max((x for x in known if x[0] == k and x[3] == 0), key=lambda x: known[x]["dev"])
            for k in KINDS
        ]
        cells = [(*x[:3], seed + 1) for x in bests]


if __name__ == "__main__":
    main()
