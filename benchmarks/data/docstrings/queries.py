"""From the summary of a docstring to a search query that does not name the documented object."""

from __future__ import annotations

import re

__all__ = ["as_query", "normalised", "query_core"]

_VERB = re.compile(
    r"(accept|add|adjust|align|allow|append|apply|approximate|assemble|assign|attach|bind|build|calculate|call|change|check|"
    r"choose|clear|clip|close|collect|combine|compare|compile|compute|concatenate|configure|connect|construct|convert|copy|"
    r"count|create|decide|declare|decode|decompose|define|delete|describe|detect|determine|disable|display|divide|download|"
    r"draw|drop|embed|enable|encode|ensure|enumerate|escape|estimate|evaluate|execute|expand|export|extend|extract|factorize|"
    r"fetch|fill|find|fit|flatten|format|gather|generate|get|give|group|handle|identify|implement|import|indicate|infer|"
    r"initialize|insert|instantiate|integrate|interpolate|invert|iterate|join|keep|learn|list|load|locate|log|make|map|mark|"
    r"mask|measure|merge|minimize|modify|move|multiply|normalize|obtain|open|pad|parse|partition|perform|pick|plot|predict|"
    r"prepare|print|process|produce|provide|query|raise|read|record|reduce|register|remove|rename|render|reorder|repeat|"
    r"replace|represent|reset|reshape|resize|resolve|restore|retrieve|return|reverse|rotate|run|sample|save|search|select|"
    r"send|serialize|set|show|shuffle|simulate|solve|sort|split|stack|start|stop|store|strip|sum|swap|take|test|tokenize|"
    r"track|train|transform|translate|traverse|try|update|upload|validate|verify|wait|wrap|write|yield)(?:e?s)?"
)
_WHETHER = re.compile(
    r"^(?:returns?|indicates?) (?:(?:true|a boolean) (?:if and only if|iff|if|when)|whether)\b",
    re.I,
)
_QUESTION = re.compile(r"^(?:how do I \w+|what is) ")
_NO_QUERY = re.compile(
    r"^(?:deprecated|internal|private|helper|see|alias|same|todo|fixme|note|warning|mixin|initiali[sz]e"
    r" self|overrid"
    r"|this |subclass|base class|abstract|equivalent|inherit|if |when |for |example|default|called"
    r" |test|dummy|stub"
    r"|not |it |wrap|implementation of|version of|like |legacy|use |these"
    r" |copyright|created|author|we |you "
    r"|\(?property|discouraged)|\b(?:deprecated|docstring)\b|::|>>>|->|[={}<>\\|]|\w\(",
    re.I,
)


def as_query(summary: str, name: str) -> str | None:
    """The summary as a question without the object's own name, or None if it does not make a useful
    question.

    A leading "name:" and a parenthesised "(name)" are removed. A summary that names the object
    elsewhere is not used.

    Example:
        >>> as_query("Returns the discrete spectrum of a signal.", "fft")
        'how do I get the discrete spectrum of a signal?'
    """
    if _names(summary, name):
        own = rf"`*{_spellings(name)}(?:\([^)]*\))?`*"
        summary = re.sub(
            rf"^{own}\s*(?:[:,–—-]+|->|\bis\b)\s+|\s*\(\s*{own}\s*\)", "", summary, flags=re.I
        )
    summary = _WHETHER.sub("check whether", summary.rstrip(" .:;!?"))
    words = summary.split()
    letters = sum(word.strip(".,;:()!?'\"-").isalpha() for word in words)
    if (
        not 4 <= len(words) <= 25
        or letters < 0.7 * len(words)
        or _NO_QUERY.search(summary)
        or _names(summary, name)
    ):
        return None
    first, rest = words[0], " ".join(words[1:])
    if verb := _VERB.fullmatch(first.lower()):
        return f"how do I {'get' if verb[1] == 'return' else verb[1]} {rest}?"
    if first[1:].islower() or len(first) == 1:
        first = first.lower()
    return f"what is {first} {rest}?" if first in ("a", "an", "the") else f"{first} {rest}"


def query_core(query: str) -> str:
    """The normalised words of a query, without the question around them."""
    return normalised(_QUESTION.sub("", query))


def normalised(text: str) -> str:
    """Lower-cased words and digits, separated by single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _names(text: str, name: str) -> bool:
    """Whether a text contains a name in any of its spellings: ``KMeans`` as ``kmeans``, ``k-means``
    or ``K means``.

    Example:
        >>> _names("Cluster by K-means.", "KMeans"), _names("Cluster by the mean.", "KMeans")
        (True, False)
    """
    bare = re.compile(r"[\W_]+")
    # saves the compilation of a pattern
    if bare.sub("", name).lower() not in bare.sub("", text).lower():
        return False
    return re.search(_spellings(name), text, re.I) is not None


def _spellings(name: str) -> str:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name) or [name]
    return r"(?<![A-Za-z0-9])" + r"[\W_]*".join(map(re.escape, parts)) + r"s?(?![A-Za-z0-9])"
