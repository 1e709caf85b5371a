"""The findings of `check_serving`, and how to fix each of them on each kind of server.

Every switch was read in the server's source or run; docs/serving.md names the versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Finding", "finding"]

TEXTS = {
    "norms lost": "All norms are {median:.3f}; the model's {who} have {expected}.",
    "pooling": "The target pools by {served}; the model pools by {pooling}.",
    "prompt": "The {who} were read with {sent!r} before them; the model's prompt is {prompt!r}.",
    "modules skipped": "The target leaves out the last modules: {served}.",
    "end token missing": "The target leaves out the last token, {served}, which the model reads.",
    "dimensions": "Vectors have {dim} dimensions; the model's {full} have the same directions.",
    "truncation": (
        "Texts from {first} tokens on differ: the target has another limit than the model's "
        "{limit} tokens."
    ),
    "refused": "The target refuses {texts}, the shortest of {shortest} or more tokens: {said}",
    "precision": (
        "Vectors have a relative error of {median:.1e} (at most {most:.1e}), as by numbers or "
        "weights of fewer digits, or by a checkpoint very near this one."
    ),
    "batch": "{count} of {total} texts have another vector when they are sent alone.",
    "cause unknown": "{count} of {total} {who} differ, such as {example!r}: {how}",
    "metric": "It ranks by {nearest}; the model is scored by {own}. Recall@{k} is {recall:.3f}.",
    "recall": "Recall@{k} of the exact ranking is {recall:.3f}; no other metric explains it.",
}

FIXES = {
    "norms lost": "Turn off an option called normalize in the server or client, if it has one.",
    "pooling": "Set the server's pooling to {pooling}, or use a server that has it.",
    "prompt": (
        "Put {prompt!r} before every {role} in your own client (check it with send_prompts=True, "
        "--send-prompts), and let nothing else add a prompt."
    ),
    "modules skipped": (
        "Use a server that runs all modules, such as sentence-transformers. In a client, "
        "stm.Similarity(...).document(vectors) does what Normalize and ExponentNorm do."
    ),
    "end token missing": "Let the server or client add special tokens, as the model's tokenizer.",
    "dimensions": "Ask the server for {full}, or load the model with truncate_dim={dim}.",
    "truncation": "Set the server's limit to {limit} tokens, or model.max_seq_length to its limit.",
    "refused": "Cut texts at {limit} tokens before you send them.",
    "precision": "Run the model in float32, or accept the error with tolerance= (--tolerance).",
    "batch": (
        "The rest of this check sent every text alone. Look at the order of the rows of an answer "
        "and at padding, or send one text with each request."
    ),
    "cause unknown": (
        "Check which model, revision and tokenizer the server loaded, and what it puts before "
        "texts."
    ),
    "metric": (
        "Declare the inner product, of normalised vectors if the model is scored by cosine: "
        "docs/serving.md has the names."
    ),
    "recall": (
        "If the index is approximate, raise its search width (ef, nprobe, num_candidates); check "
        "that documents= has the order of the index, and that it has this model's vectors."
    ),
}

_NO_SWITCH = "It always normalises: use another server, or train and score the model by cosine."
# The switch of a kind of server, which takes the place of the text above.
SWITCHES = {
    ("vLLM", "norms lost"): (
        "Start vLLM with --pooler-config '{{\"use_activation\": false}}', or send "
        '"use_activation": false with every request (older versions call it "normalize").'
    ),
    ("vLLM", "pooling"): (
        'Start vLLM with --pooler-config \'{{"pooling_type": "{pooling}"}}\', in its own words '
        "MEAN, CLS or LAST."
    ),
    ("vLLM", "truncation"): 'Send "truncate_prompt_tokens": {limit} with every request.',
    ("vLLM", "refused"): 'Send "truncate_prompt_tokens": -1 with every request.',
    ("vLLM", "precision"): "Start vLLM with --dtype float32, or accept the error (--tolerance).",
    ("TEI", "norms lost"): (
        'Send "normalize": false to /embed. TEI\'s route /v1/embeddings always normalises.'
    ),
    ("TEI", "pooling"): "Start TEI with --pooling {pooling} (its words: mean, cls, last-token).",
    ("TEI", "refused"): 'Start TEI with --auto-truncate, or send "truncate": true to /embed.',
    ("Infinity", "norms lost"): _NO_SWITCH,
    ("Ollama", "norms lost"): _NO_SWITCH,
    ("llama.cpp", "norms lost"): (
        'Start llama-server with --embd-normalize -1, or send "embd_normalize": -1 with every '
        "request."
    ),
    ("llama.cpp", "pooling"): "Start llama-server with --pooling {pooling} (mean, cls or last).",
}


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes."""

    name: str  # short and fixed, such as "norms lost"; docs/serving.md has the list
    text: str  # the difference with its figures
    fix: str  # what to change, with the switch of this server where it has one


def finding(name: str, server: str, **details: Any) -> Finding:
    """A finding about a kind of server, with its figures and the change that fixes it."""
    fix = SWITCHES.get((server, name), FIXES[name])
    return Finding(name, TEXTS[name].format(**details), fix.format(**details))
