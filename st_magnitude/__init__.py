"""Train embedding models whose geometry is used: magnitude-aware losses for sentence-transformers.

Every name is imported when it is first used, so that ``import st_magnitude`` and ``st-magnitude --help`` are fast.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from st_magnitude import clip, geometry, revela
    from st_magnitude.commands.compare.config import CompareConfig
    from st_magnitude.commands.compare.run import compare
    from st_magnitude.corpus.encoder import Encoder
    from st_magnitude.corpus.encoding import encode_corpus
    from st_magnitude.diagnosis.diagnose import diagnose
    from st_magnitude.diagnosis.findings import Diagnosis
    from st_magnitude.evaluation import (
        CompressionEvaluator,
        GeometryEvaluator,
        MagnitudeEvaluator,
        ScoredPairsEvaluator,
    )
    from st_magnitude.evaluation.abstention import Abstention, answerable, calibrate_abstention
    from st_magnitude.evaluation.admission import Admission, admit
    from st_magnitude.evaluation.calibration import ExponentCurve, calibrate_exponent
    from st_magnitude.evaluation.mining import mine_negatives
    from st_magnitude.infonce import infonce, infonce_reference
    from st_magnitude.losses import (
        CosineRankingLoss,
        DNormRankingLoss,
        DotRankingLoss,
        LearnableNormLoss,
        MagnitudeRankingLoss,
        QNormRankingLoss,
        SIGRegInfoNCE,
        SimilarityMSELoss,
        TempAggLoss,
        TempAggMRLLoss,
        TempSpecMRLLoss,
        temp_agg,
        temp_agg_mrl,
        temp_spec_mrl,
    )
    from st_magnitude.losses.regularizers import SIGReg, covariance_penalty, norm_variance_penalty
    from st_magnitude.serving.check import check_serving
    from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
    from st_magnitude.surgery.cut_init import cut_init
    from st_magnitude.surgery.export import export, load
    from st_magnitude.surgery.grad_scale import attach_grad_scale, grad_scale
    from st_magnitude.surgery.normalize import add_normalize, prepare, rescale_output, strip_normalize
    from st_magnitude.terms import LearnedTemperature, Term
    from st_magnitude.training.monitor import NormMonitor
    from st_magnitude.training.state import attach

__version__ = "0.1.0"

__all__ = [
    "COSINE",
    "DNORM",
    "DOT",
    "QNORM",
    "Abstention",
    "Admission",
    "CompareConfig",
    "CompressionEvaluator",
    "CosineRankingLoss",
    "DNormRankingLoss",
    "Diagnosis",
    "DotRankingLoss",
    "Encoder",
    "ExponentCurve",
    "GeometryEvaluator",
    "LearnableNormLoss",
    "LearnedTemperature",
    "MagnitudeEvaluator",
    "MagnitudeRankingLoss",
    "NormMonitor",
    "QNormRankingLoss",
    "SIGReg",
    "SIGRegInfoNCE",
    "ScoredPairsEvaluator",
    "Similarity",
    "SimilarityMSELoss",
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
    "Term",
    "add_normalize",
    "admit",
    "answerable",
    "attach",
    "attach_grad_scale",
    "calibrate_abstention",
    "calibrate_exponent",
    "check_serving",
    "clip",
    "compare",
    "covariance_penalty",
    "cut_init",
    "diagnose",
    "encode_corpus",
    "export",
    "geometry",
    "grad_scale",
    "infonce",
    "infonce_reference",
    "load",
    "mine_negatives",
    "norm_variance_penalty",
    "prepare",
    "rescale_output",
    "revela",
    "strip_normalize",
    "temp_agg",
    "temp_agg_mrl",
    "temp_spec_mrl",
]

_HOMES = {
    "corpus.encoder": ["Encoder"],
    "commands.compare.config": ["CompareConfig"],
    "commands.compare.run": ["compare"],
    "corpus.encoding": ["encode_corpus"],
    "diagnosis.diagnose": ["diagnose"],
    "diagnosis.findings": ["Diagnosis"],
    "evaluation": ["CompressionEvaluator", "GeometryEvaluator", "MagnitudeEvaluator", "ScoredPairsEvaluator"],
    "evaluation.abstention": ["Abstention", "answerable", "calibrate_abstention"],
    "evaluation.admission": ["Admission", "admit"],
    "evaluation.calibration": ["ExponentCurve", "calibrate_exponent"],
    "evaluation.mining": ["mine_negatives"],
    "infonce": ["infonce_reference"],
    "losses": [
        *("CosineRankingLoss", "DNormRankingLoss", "DotRankingLoss", "LearnableNormLoss", "MagnitudeRankingLoss"),
        *("QNormRankingLoss", "SIGRegInfoNCE", "SimilarityMSELoss", "TempAggLoss", "TempAggMRLLoss"),
        *("TempSpecMRLLoss", "temp_agg", "temp_agg_mrl", "temp_spec_mrl"),
    ],
    "losses.regularizers": ["SIGReg", "covariance_penalty", "norm_variance_penalty"],
    "serving.check": ["check_serving"],
    "similarity": ["COSINE", "DNORM", "DOT", "QNORM", "Similarity"],
    "surgery.grad_scale": ["attach_grad_scale", "grad_scale"],
    "surgery.cut_init": ["cut_init"],
    "surgery.export": ["export", "load"],
    "surgery.normalize": ["add_normalize", "prepare", "rescale_output", "strip_normalize"],
    "terms": ["LearnedTemperature", "Term"],
    "training.monitor": ["NormMonitor"],
    "training.state": ["attach"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("clip", "geometry", "revela"):
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``st_magnitude.infonce`` the function, where Python would put the module of the same name."""

    @property
    def infonce(self) -> Any:
        return import_module(f"{__name__}.infonce").infonce

    @infonce.setter
    def infonce(self, module: ModuleType) -> None:
        pass  # Python sets the attribute when the module is first imported


sys.modules[__name__].__class__ = _Package
