"""The findings of `check_serving`, and how to fix each of them on each kind of server.

Every switch was read in the server's source or run; docs/serving.md names the versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Finding", "finding"]

TEXTS = {
    "norms lost": "All norms are {median:.3f}; the model's {who} have {expected}.",
    "not normalised": "Norms are {norms}; the model ends in Normalize.",
    "exponent not applied": "Norms are {norms}, as without ExponentNorm; the model's: {expected}.",
    "role ignored": "Queries are divided by the document exponent: {norms}, not {expected}.",
    "pooling": "The target pools by {served}; the model pools by {pooling}.",
    "prompt": "The {who} were read with {sent!r} before them; the model's prompt is {prompt!r}.",
    "modules skipped": "The target leaves out what follows the pooling: {served}.",
    "end token missing": "The target leaves out the last token, {served}, which the model reads.",
    "dimensions": "Vectors have {dim} dimensions; the model's {full} have the same directions.",
    "truncation": (
        "Texts from {first} tokens on differ: the target has another limit than the "
        "model's {limit} tokens."
    ),
    "refused": "The target refuses {texts}, the shortest of {shortest} or more tokens: {said}",
    "precision": (
        "Vectors have a relative error of {median:.1e} (at most {most:.1e}), as by "
        "numbers or weights of fewer digits, or by a checkpoint very near this one."
    ),
    "batch": "{count} of {total} texts have another vector when they are sent alone.",
    "cause unknown": "{count} of {total} {who} differ, such as {example!r}: {how}",
    "metric": "It ranks by {nearest}; the model is scored by {own}. Recall@{k} is {recall:.3f}.",
    "recall": "Recall@{k} of the exact ranking is {recall:.3f}; no other metric explains it.",
}

_DTYPE = "Start {server} with --dtype float32, or accept the error with tolerance= (--tolerance)."
_LLAMA_CUT = (
    "Cut texts at {limit} tokens in your client: llama.cpp does not truncate, and refuses texts "
    "of more than --ubatch-size tokens (512 by default)."
)
_NO_SWITCH = (
    "{server} always normalises: serve this model with another server, or train and score it by "
    "cosine."
)
_PROMPT = (
    "Put {prompt!r} before every {role} in your own client (check it with send_prompts=True, "
    "--send-prompts), and let nothing else add a prompt."
)

# By finding: what to do. By kind of server where it has a switch; "" is for all others.
FIXES: dict[str, str | dict[str, str]] = {
    "norms lost": {
        "vLLM": (
            "Start vLLM with --pooler-config '{{\"use_activation\": false}}', or send "
            '"use_activation": false with every request (older versions call it "normalize").'
        ),
        "TEI": 'Send "normalize": false to /embed. TEI\'s route /v1/embeddings always normalises.',
        "Infinity": _NO_SWITCH,
        "llama.cpp": (
            "Start llama-server with --embd-normalize -1, or send "
            '"embd_normalize": -1 with every request; the default 2 normalises.'
        ),
        "Ollama": _NO_SWITCH,
        "": (
            "Look for an option called normalize in the server or client, and turn it off. If it "
            "has none, norms cannot be served by it."
        ),
    },
    "not normalised": "Divide the vectors by their norms in your client, or search by cosine.",
    "exponent not applied": (
        "The server does not run ExponentNorm. Apply it to what comes back: "
        "stm.Similarity({exponents[0]:g}, {exponents[1]:g}).document(vectors)."
    ),
    "role ignored": (
        "No ranking changes. For scores on one scale over all queries, send queries to "
        "a route of their own, or divide them in your client."
    ),
    "pooling": {
        "vLLM": (
            'Start vLLM with --pooler-config \'{{"pooling_type": "{pooling}"}}\', in its own words'
            " MEAN, CLS or LAST. Before its fix #54533 (August 2026) it does not read the pooling"
            " that sentence-transformers 5.4 and later save."
        ),
        "TEI": "Start TEI with --pooling {pooling} (in its own words mean, cls or last-token).",
        "llama.cpp": "Start llama-server with --pooling {pooling} (its words: mean, cls or last).",
        "": "Set the server's pooling to {pooling}, or use a server that has it.",
    },
    "prompt": {
        "TEI": 'Send "prompt_name": "{role}" to /embed, or: ' + _PROMPT,
        "vLLM": 'Use vLLM\'s route /v2/embed with "input_type": "{role}", or: ' + _PROMPT,
        "": _PROMPT,
    },
    "modules skipped": (
        "Serve this model with a server that runs all its modules, such as sentence-transformers."
    ),
    "end token missing": (
        "Let the server or client add special tokens, and compare its tokenizer "
        "files with the model's."
    ),
    "dimensions": "Ask the server for {full}, or load the model with truncate_dim={dim}.",
    "truncation": {
        "vLLM": (
            'Start vLLM with --max-model-len {limit}, and send "truncate_prompt_tokens": {limit}.'
        ),
        "TEI": 'Set "max_seq_length": {limit} in the sentence_bert_config.json that TEI loads.',
        "llama.cpp": _LLAMA_CUT,
        "": "Set the server's limit to {limit} tokens, or model.max_seq_length to the server's.",
    },
    "refused": {
        "vLLM": 'Send "truncate_prompt_tokens": -1 with every request.',
        "TEI": 'Start TEI with --auto-truncate, or send "truncate": true to /embed.',
        "llama.cpp": _LLAMA_CUT,
        "": "Cut texts at {limit} tokens before you send them.",
    },
    "precision": {
        "vLLM": _DTYPE,
        "TEI": _DTYPE,
        "Infinity": _DTYPE,
        "llama.cpp": (
            "llama.cpp approximates GELU, which costs about 1e-3 at any --outtype: accept that with"
            " tolerance= (--tolerance). If the error is larger, convert with --outtype f32."
        ),
        "": "Run the model in float32, or accept the error with tolerance= (--tolerance).",
    },
    "batch": (
        "The rest of this check sent every text alone. Look at the order of the rows of an "
        "answer and at padding, or send one text with each request."
    ),
    "cause unknown": (
        "Check which model, revision and tokenizer the server loaded, and what it "
        "puts before texts."
    ),
    "metric": (
        "Declare the inner product, of normalised vectors if the model is scored by cosine: "
        "docs/serving.md has the names."
    ),
    "recall": (
        "If the index is approximate, raise its search width (ef, nprobe, num_candidates); "
        "check that documents= has the order of the index, and that it has this model's vectors."
    ),
}


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes."""

    name: str  # short and fixed, such as "norms lost"; docs/serving.md has the list
    text: str  # the difference with its figures
    fix: str  # what to change, with the switch of this server where it has one
    matters: bool = True  # whether scores by the model's similarity change; False for a note


def finding(name: str, server: str, **details: Any) -> Finding:
    """A finding about a kind of server, with its figures and the change that fixes it."""
    fix = FIXES[name]
    if isinstance(fix, dict):
        fix = fix.get(server, fix[""])
    text = TEXTS[name].format(**details)
    return Finding(name, text, fix.format(server=server, **details), name != "role ignored")
