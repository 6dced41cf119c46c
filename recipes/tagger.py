"""Train the tagger of `eyas.privacy` on the texts of `entities.py`, and write its weights.

    pip install -e '.[train]' --group recipes    # pip 25.1 or newer
    python recipes/tagger.py eyas/privacy/weights/tagger.npz --data ../shared/data

data: a folder with `ner/*.tsv.gz`, labelled sentences (Universal NER, universalner.org; the Broad
Twitter Corpus, github.com/GateNLP/broad_twitter_corpus; WikiGold, on the authors' pages), and
prompts (`gsm8k_train`, `tldr`, `self_dialogue`, `instructions`; as `benchmarks/natural.py` reads
them). Without it only made-up texts are used. It takes about twenty minutes of one core, and
goes on from what it saved when it is started again. The packaged weights are no single run of it:
eyas/privacy/weights/README.md.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import natural
from eyas.privacy import tagger
from eyas.privacy.tagger import DILATIONS, LABELS, LISTS, NUM_BUCKETS
from recipes import entities
from recipes.entities import PERSON, STREET, Text, Writer

SEED, D, H = 5, 40, 96  # sizes of a token's vector, of a convolution's output
NUM_ENGLISH, NUM_ROWS, NUM_FRAMES = 85_000, 3000, 50_000
MOST_TOKENS, BATCH_TOKENS, CHUNK = 300, 7000, 12_000
EPOCHS, TABLE_LR, LR, WARM, FALL, SNAPSHOT = 5.0, 4e-3, 2e-3, 100, 0.4, 200
UNKNOWN, PADDING = -1, -2  # labels: no person and no address; no token
# Shares of features that are left out, so that unseen names are not unlike seen ones
DROP, DROP_LISTED, DROP_WORD, DROP_CASED, DROP_PAIR = 0.15, 0.2, 0.35, 0.45, 0.25
DROP_HIDDEN = 0.15
CASED = 6  # the place of the word in its case, counted from the word's
GOES = [LABELS.index(f"{place}-{type}") for type in (PERSON, STREET) for place in "BI"]


def texts(data: Path | None) -> Iterator[Text]:
    """Everything that is trained on."""
    writer = Writer(SEED)
    yield from writer.english(NUM_ENGLISH)
    yield from writer.rows(NUM_ROWS)
    yield from writer.frames(NUM_FRAMES)
    if data is None:
        return
    yield from entities.gold_texts(data / "ner", writer, SEED)
    read = json.loads(gzip.decompress(natural.LABELS.read_bytes()))
    for name, text in entities.kept_texts(data, read):
        yield text
        if name == "instructions":
            yield from itertools.islice(writer.sentences(text.text), 6)
    for row in natural.labelled(data):
        if row.is_tuned:
            spans = [(start, end, type) for type, start, end, who in row.spans
                     if who == "private" and type in (PERSON, STREET)]  # fmt: skip
            for _ in range(3):
                yield Text(row.text, spans, [(0, len(row.text))])


class Vocabulary:
    """The keys of all tokens by number, and the features of each."""

    def __init__(self, lists: dict[str, np.ndarray]) -> None:
        self._lists = {name: frozenset(one.tolist()) for name, one in lists.items()}
        self._numbers: dict[str, int] = {}
        self.rows: list[np.ndarray] = []
        self.shares: list[np.ndarray] = []
        self.listed: list[int] = []  # how many features, the first ones, say of which lists it is
        self.word: list[int] = []  # the place of the feature that is the word itself, -1 = none
        self.pair: list[int] = []  # of a character with the one before it, -1 = none

    def number(self, key: str) -> int:
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            rows, shares = tagger.buckets(key, self._lists)
            count = len(tagger.listed(key, self._lists))
            self.rows.append(np.array(rows))
            self.shares.append(np.array(shares, np.float32))
            self.listed.append(count)
            kind = tagger.features(key)[0][0][0]
            self.word.append(count if kind == "w" else -1)
            self.pair.append(count + 1 if kind == "c" else -1)
        return self._numbers[key]

    def encode(self, text: Text) -> tuple[np.ndarray, np.ndarray]:
        """Keys and labels of a text's first tokens."""
        tokens = tagger.tokenize(text.text)[:MOST_TOKENS]
        labels = np.zeros(len(tokens), np.int64)
        starts = np.array([start for _, start, _ in tokens])
        ends = np.array([end for _, _, end in tokens])
        for start, end in text.unknown:
            labels[(start <= starts) & (starts < end)] = UNKNOWN
        for start, end, type in text.spans:
            inside = np.flatnonzero((starts < end) & (ends > start))
            labels[inside] = LABELS.index(f"I-{type}")
            labels[inside[:1]] = LABELS.index(f"B-{type}")
        keys = tagger.keys([word for word, _, _ in tokens])
        return np.array([self.number(key) for key in keys], np.int64), labels

    def features(self, keys: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of the table, where each key's begin, and their shares with some left out."""
        rows = [self.rows[key] for key in keys]
        begin = np.cumsum([0, *(len(one) for one in rows[:-1])])
        shares = torch.from_numpy(np.concatenate([self.shares[key] for key in keys]))
        kept = (torch.rand_like(shares) > DROP).float()
        listed = [start + at for start, key in zip(begin, keys, strict=True)
                  for at in range(self.listed[key])]  # fmt: skip
        word, pair = (
            torch.tensor([start + place[key] for start, key in zip(begin, keys, strict=True)
                          if place[key] >= 0], dtype=torch.int64)
            for place in (self.word, self.pair)
        )  # fmt: skip
        for places, share in ((torch.tensor(listed), DROP_LISTED), (word, DROP_WORD),
                              (word + CASED, DROP_CASED), (pair, DROP_PAIR),
                              (pair + 1, DROP_PAIR)):  # fmt: skip
            if len(places):
                kept[places[torch.rand(len(places)) < share].long()] = 0
        return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(begin), shares * kept


class Network(nn.Module):
    """`tagger.Tagger` as it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(NUM_BUCKETS, D, mode="sum")
        nn.init.normal_(self.table.weight, 0, 0.1)
        self.convs = nn.ModuleList(nn.Linear(5 * size, H) for size in (D, H, H))
        self.pool = nn.Linear(2 * H, H, bias=False)
        self.out = nn.Linear(H + D, len(LABELS))
        self.drop = nn.Dropout(DROP_HIDDEN)

    def near(self, inputs: torch.Tensor, layer: int, added: torch.Tensor | float) -> torch.Tensor:
        step, length = DILATIONS[layer], inputs.shape[1]
        padded = nn.functional.pad(inputs, (0, 0, 2 * step, 2 * step))
        beside = [padded[:, place * step : place * step + length] for place in range(5)]
        return torch.relu(self.convs[layer](torch.cat(beside, 2)) + added)

    def forward(self, inputs: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """[B, T, D] and [B, T, 1] -> scores [B, T, labels]."""
        inputs = self.drop(inputs * inside)
        hidden = self.near(inputs, 0, 0.0) * inside
        pooled = torch.cat([hidden.sum(1) / inside.sum(1), hidden.max(1).values], 1)
        hidden = (hidden + self.near(hidden, 1, self.pool(pooled)[:, None])) * inside
        hidden = (hidden + self.near(hidden, 2, 0.0)) * inside
        scores: torch.Tensor = self.out(torch.cat([self.drop(hidden), inputs], 2))
        return scores


def batches(lengths: list[int], chance: random.Random) -> list[list[int]]:
    """Texts of like lengths together, about BATCH_TOKENS tokens with the padding."""
    order = list(range(len(lengths)))
    chance.shuffle(order)
    found: list[list[int]] = []
    for start in range(0, len(order), CHUNK):
        batch: list[int] = []
        for one in sorted(order[start : start + CHUNK], key=lengths.__getitem__):
            if batch and lengths[one] * (len(batch) + 1) > BATCH_TOKENS:
                found.append(batch)
                batch = []
            batch.append(one)
        found.append(batch)
    chance.shuffle(found)
    return found


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy; of an UNKNOWN token that it is any of the labels that stay."""
    logs, labels = torch.log_softmax(scores, -1).flatten(0, 1), labels.flatten()
    known, unknown = labels >= 0, labels == UNKNOWN
    stays = [label for label in range(len(LABELS)) if label not in GOES]
    right = logs[known].gather(1, labels[known, None]).sum()
    right = right + torch.logsumexp(logs[unknown][:, stays], 1).sum()
    return -right / (known.sum() + unknown.sum())


def train(
    network: Network, encoded: list[tuple[np.ndarray, np.ndarray]], vocabulary: Vocabulary,
    epochs: float, saved: Path,
) -> Iterator[int]:  # fmt: skip
    """Adam, the rate rising for WARM steps, and falling to nothing over the last FALL of all steps.
    saved: what is written each SNAPSHOT steps, and gone on from where it exists, even with another
    number of epochs. Yields each step's number.
    """
    lengths = [len(keys) for keys, _ in encoded]
    rest = [one for name, one in network.named_parameters() if not name.startswith("table")]
    groups = [{"params": [network.table.weight], "lr": TABLE_LR}, {"params": rest, "lr": LR}]
    optimizer = torch.optim.Adam(groups, fused=True)
    steps = int(len(batches(lengths, random.Random(SEED))) * epochs)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM, 1.0, max((1 - step / steps) / FALL, 0.01))
    )
    start = 0
    if saved.exists():
        kept = torch.load(saved)
        network.load_state_dict(kept["network"])
        optimizer.load_state_dict(kept["optimizer"])
        start = schedule.last_epoch = kept["step"]
    chance = random.Random(SEED + start)
    queue: list[list[int]] = []
    for step in range(start, steps):
        queue = queue or batches(lengths, chance)
        batch = queue.pop()
        most = max(lengths[one] for one in batch)
        keys, labels = (np.full((len(batch), most), fill) for fill in (0, PADDING))
        for row, one in enumerate(batch):
            keys[row, : lengths[one]], labels[row, : lengths[one]] = encoded[one]
        distinct, places = np.unique(keys, return_inverse=True)
        rows, begin, shares = vocabulary.features(distinct)
        vectors = network.table(rows, begin, per_sample_weights=shares)
        inside = torch.from_numpy(labels[..., None] != PADDING).float()
        scores = network(vectors[torch.from_numpy(places.reshape(keys.shape))], inside)
        loss = loss_of(scores, torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}, loss {loss.item():.4f}", flush=True)
        if step % SNAPSHOT == SNAPSHOT - 1:
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, saved)
        yield step


def packed(network: Network, lists: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of `tagger.Tagger`: the table in eight bits, by column; the rest in sixteen."""
    table = network.table.weight.detach().numpy()
    scale = np.quantile(np.abs(table), 0.9999, axis=0).astype(np.float32) / 127
    arrays = {
        "pool": network.pool.weight.T, "out": network.out.weight.T, "bias_out": network.out.bias,
        **{f"conv{layer}": conv.weight.T for layer, conv in enumerate(network.convs)},
        **{f"bias{layer}": conv.bias for layer, conv in enumerate(network.convs)},
    }  # fmt: skip
    return {
        "table": np.clip(np.rint(table / scale), -127, 127).astype(np.int8),
        "scale": scale, **lists,
        **{name: one.detach().numpy().astype(np.float16) for name, one in arrays.items()},
    }  # fmt: skip


def main() -> None:
    """Write the weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--share", type=float, default=1.0, help="of the texts, for a trial")
    options = parser.parse_args()
    words = entities.lists()
    lists = {name: np.array(sorted(map(tagger.hashed, words[name])), np.uint32) for name in LISTS}
    vocabulary = Vocabulary(lists)
    chance = random.Random(SEED)
    encoded = [
        one for text in texts(options.data)
        if chance.random() < options.share and len((one := vocabulary.encode(text))[0])
    ]  # fmt: skip
    tokens = sum(len(keys) for keys, _ in encoded)
    print(f"{len(encoded)} texts, {tokens} tokens, {len(vocabulary.rows)} distinct", flush=True)
    torch.manual_seed(SEED)
    network = Network()
    saved = options.weights.with_suffix(".pt")
    for _ in train(network, encoded, vocabulary, options.epochs, saved):
        pass
    np.savez_compressed(options.weights, **packed(network, lists))
    saved.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
