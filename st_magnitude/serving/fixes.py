"""The findings of `check_serving`, each with its remedy.

Every switch was read in the server's source or run; docs/serving.md names the versions.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding", "finding"]

# The difference with its figures, and what to do.
_FINDINGS = {
    "norms": (
        "The target's documents have norms of {served}; the model's have {expected}.",
        "Turn off normalisation: vLLM --pooler-config '{{\"use_activation\": false}}'; "
        'text-embeddings-inference "normalize": false to /embed (its /v1/embeddings always '
        "normalises); llama.cpp --embd-normalize -1; Infinity and Ollama always normalise. If the "
        "server leaves out the model's Normalize or ExponentNorm, divide in your client by "
        "stm.Similarity(...).document(vectors).",
    ),
    "prompt": (
        "Texts are read without the model's prompts, {query!r} for queries and {document!r} for "
        "documents.",
        "Put them before the texts in your own client (check it with send_prompts=True, "
        "--send-prompts), and let nothing else add a prompt.",
    ),
    "dimensions": (
        "Vectors have {dim} dimensions; the model's have {full}.",
        "Ask the server for {full}, or load the model with truncate_dim={dim}.",
    ),
    "truncation": (
        "Texts from {first} tokens on differ: the target has another limit than the model's "
        "{limit} tokens.",
        "Set the server's limit to {limit} tokens, or model.max_seq_length to its limit. vLLM "
        'takes "truncate_prompt_tokens": {limit} with every request.',
    ),
    "refused": (
        "The target refuses {count} texts, the shortest of {shortest} tokens: {said}",
        "Cut texts at {limit} tokens before you send them, or let the server cut them: vLLM "
        '"truncate_prompt_tokens": -1 with every request; text-embeddings-inference '
        "--auto-truncate.",
    ),
    "precision": (
        "Vectors have a relative error of {median:.1e} (at most {most:.1e}), as by numbers or "
        "weights of fewer digits, or by a checkpoint very near this one.",
        "Run the model in float32 (vLLM --dtype float32), or accept the error with tolerance= "
        "(--tolerance).",
    ),
    "vectors": (
        "{count} of {total} {role} texts have other vectors, such as {example!r} (relative error "
        "{error:.3f}, median of all).",
        "The usual causes: another pooling (the model's is {pooling}; vLLM --pooler-config "
        "'{{\"pooling_type\": ...}}', text-embeddings-inference and llama.cpp --pooling), modules "
        "that do not run (the model's are {modules}), a prompt or a special token that is added "
        "or missing, rows in another order, another model or revision.",
    ),
    "recall": (
        "Recall@{k} of the exact ranking by {own} is {recall:.3f}.",
        "The usual causes: the index is not declared with the inner product (docs/serving.md has "
        "the names), an approximate search that is too narrow (ef, nprobe, num_candidates), "
        "documents= in another order, vectors of another model.",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One difference between what a target returns and what the model computes."""

    name: str  # short and fixed, such as "norms"; docs/serving.md has the list
    text: str  # the difference with its figures
    fix: str  # what to change


def finding(name: str, **details: object) -> Finding:
    """A finding with its figures and its remedy."""
    text, fix = _FINDINGS[name]
    return Finding(name, text.format(**details), fix.format(**details))
