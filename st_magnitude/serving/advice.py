"""Findings of `check_serving`, and how to fix each of them on each kind of server.

Every switch was read in the server's source or run; docs/serving.md names the versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["POOLING_NAMES", "Finding", "describe"]

NOTES = ("role ignored", "norms scaled")  # findings that change no ranking

# The names of a pooling mode on the servers; no other mode has a name on each of them.
POOLING_NAMES = {
    "mean": {"vllm_pooling": "MEAN", "tei_pooling": "mean", "llama_pooling": "mean"},
    "cls": {"vllm_pooling": "CLS", "tei_pooling": "cls", "llama_pooling": "cls"},
    "lasttoken": {"vllm_pooling": "LAST", "tei_pooling": "last-token", "llama_pooling": "last"},
}

# By finding: what is wrong, with its figures.
TEXTS = {
    "norms lost": "All norms are {median:.3f}; the model's {who} have {expected}.",
    "not normalised": "Norms are {norms}; the model ends in Normalize.",
    "exponent not applied": "Norms are {norms}, as without ExponentNorm; the model's are {expected}.",
    "role ignored": "Queries are divided by the document exponent: norms {norms}, the model's {expected}.",
    "pooling": "The target pools by {served}; the model pools by {pooling}.",
    "prompt missing": "The {who} were encoded without their prompt {prompt!r}.",
    "prompt twice": "The {who} were encoded with the prompt {prompt!r} twice.",
    "prompt of the other role": "The {who} were encoded with the prompt of the other role.",
    "modules skipped": "The target leaves out what follows the pooling: {skipped}.",
    "truncation": "Texts from {first} tokens on differ: the target has another limit than the model's {limit} tokens.",
    "refused": "The target refuses {texts}, the shortest of {shortest} or more tokens: {said}",
    "precision": "Vectors have a relative error of {median:.1e} (at most {most:.1e}), as by numbers or weights of "
    "fewer digits, or by a checkpoint very near this one.",
    "norms scaled": "Vectors are {factor:.4g} times the model's.",
    "norms differ": "Norms are {norms}; the model's are {expected}, and do not explain them.",
    "dimensions": "Vectors have {dim} dimensions; the model has {full}, and its first {dim} have the same directions.",
    "tokenizer": "{count} of {total} texts differ, such as {example!r}; all others agree.",
    "another model": "The {who} come from another model or checkpoint, or from a prompt that the model does not have: "
    "{how}",
    "metric": "It ranks by {nearest}; the model is scored by {own}. Recall@{k} is {recall:.3f}.",
    "recall": "Recall@{k} of the exact ranking is {recall:.3f}, and no other metric explains the difference.",
}

_DTYPE = "Start {server} with --dtype float32 if you need more digits."
_OWN_PROMPT = "Put {prompt!r} before every {role} in your own client (check it with send_prompts=True, --send-prompts)."
_LLAMA_CUT = (
    "Cut texts at {limit} tokens in your client: llama.cpp does not truncate, and refuses texts of more than "
    "--ubatch-size tokens (512 by default)."
)

# By finding and kind of server: what to do. "" is for a server that is not known, and for callables.
FIXES = {
    "norms lost": {
        "vLLM": 'Start vLLM with --pooler-config \'{{"use_activation": false}}\', or send "use_activation": false '
        'with every request (older versions call it "normalize").',
        "TEI": 'Send "normalize": false to /embed. TEI\'s route /v1/embeddings always normalises.',
        "Infinity": "Infinity always normalises and has no switch for it (0.0.78): serve this model with another "
        "server, or train and score it by cosine.",
        "llama.cpp": 'Start llama-server with --embd-normalize -1, or send "embd_normalize": -1 with every request; '
        "the default 2 normalises.",
        "Ollama": "Ollama's /api/embed and /v1/embeddings always normalise: serve this model with another server, or "
        "train and score it by cosine.",
        "": "Look for an option called normalize in the server or client, and turn it off. If it has none, norms "
        "cannot be served by it.",
    },
    "not normalised": {
        "vLLM": "Start vLLM with --pooler-config '{{\"use_activation\": true}}'.",
        "TEI": 'Send "normalize": true to /embed, or leave it out.',
        "": "Divide the vectors by their norms in your client, or search by cosine.",
    },
    "exponent not applied": {
        "": "The server does not run ExponentNorm. Apply it to what comes back before you store it: "
        "stm.Similarity({gamma_query:g}, {gamma_document:g}).document(vectors)."
    },
    "role ignored": {
        "": "No ranking changes. For scores on one scale over all queries, send queries to a route or server of their "
        "own, or divide them in your client."
    },
    "pooling": {
        "vLLM": 'Start vLLM with --pooler-config \'{{"pooling_type": "{vllm_pooling}"}}\'. Before its fix #54533 '
        "(August 2026) it does not read the pooling that sentence-transformers 5.4 and later save.",
        "TEI": "Start TEI with --pooling {tei_pooling}.",
        "llama.cpp": "Start llama-server with --pooling {llama_pooling}.",
        "": "Set the server's pooling to {pooling}, or use a server that has it.",
    },
    "prompt missing": {
        "TEI": 'Send "prompt_name": "{role}" to /embed, or put {prompt!r} before every {role} in your own client.',
        "vLLM": "Put {prompt!r} before every {role} in your own client, or use vLLM's route /v2/embed with "
        '"input_type": "{role}".',
        "": _OWN_PROMPT,
    },
    "prompt twice": {"": "Send texts without the prompt, or turn off the server's own prompt."},
    "prompt of the other role": {
        "TEI": 'Leave out --default-prompt and --default-prompt-name, and send "prompt_name" for each role.',
        "": "Turn off the server's own prompt, and put {prompt!r} before every {role} in your own client.",
    },
    "modules skipped": {"": "Serve this model with a server that runs all its modules, such as sentence-transformers."},
    "truncation": {
        "vLLM": 'Start vLLM with --max-model-len {limit}, and send "truncate_prompt_tokens": {limit}.',
        "TEI": 'Set "max_seq_length": {limit} in sentence_bert_config.json of the model that TEI loads.',
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
        "llama.cpp": "llama.cpp approximates GELU, which costs about 1e-3 at any --outtype: accept that with "
        "tolerance= (--tolerance). Convert the model with --outtype f32 if the error is larger.",
        "": "Run the model in float32 if you need more digits, or accept the error with tolerance= (--tolerance).",
    },
    "norms scaled": {"": "Rankings agree. Never mix these vectors with the model's own in one index."},
    "norms differ": {"": "Compare the modules of the served model with those of the saved one."},
    "dimensions": {"": "Ask the server for all dimensions, or load the model with truncate_dim={dim}."},
    "tokenizer": {"": "Compare the tokenizer files of the served model with those of the saved one."},
    "another model": {"": "Check which model and revision the server loaded, and its tokenizer."},
    "metric": {  # by the model's similarity function
        "dot": "Declare the metric of docs/serving.md: the inner product, and store vectors that are not normalised.",
        "": "Declare the metric of docs/serving.md: cosine, or the inner product of normalised vectors.",
    },
    "recall": {
        "": "If the index is approximate, raise its search width (ef, nprobe, num_candidates); check that documents= "
        "has the order of the index, and that the index holds the vectors of this model."
    },
}


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes."""

    name: str  # short and fixed, such as "norms lost"; docs/serving.md has the list
    text: str  # the difference with its figures
    fix: str  # what to change, with the switch of this server where it has one
    matters: bool = True  # whether scores by the model's similarity change; False for a note


def describe(name: str, server: str, **details: Any) -> Finding:
    """A finding about a kind of server, with its figures and the change that fixes it."""
    fixes = FIXES[name]
    fix = fixes.get(server, fixes[""]).format(server=server, **details)
    return Finding(name, TEXTS[name].format(**details), fix, matters=name not in NOTES)
