"""Train a retriever on your own pairs: large batches in a fraction of the time and memory, and a
verdict on what helped.

Every name is imported when it is first used, so ``import st_magnitude`` and ``st-magnitude --help``
are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude import clip as clip
    from st_magnitude import geometry as geometry
    from st_magnitude import revela as revela
    from st_magnitude.comparison.compare import compare as compare
    from st_magnitude.data.pairs import load_splits as load_splits
    from st_magnitude.data.retrieval import RetrievalData as RetrievalData
    from st_magnitude.diagnosis.diagnose import diagnose as diagnose
    from st_magnitude.evaluation.abstention import calibrate_abstention as calibrate_abstention
    from st_magnitude.evaluation.calibration import calibrate_exponent as calibrate_exponent
    from st_magnitude.evaluation.calibration import calibrate_prior as calibrate_prior
    from st_magnitude.evaluation.mining import mine_negatives as mine_negatives
    from st_magnitude.kernel.infonce import infonce as infonce
    from st_magnitude.kernel.terms import Term as Term
    from st_magnitude.losses import CosineRankingLoss as CosineRankingLoss
    from st_magnitude.losses import DNormRankingLoss as DNormRankingLoss
    from st_magnitude.losses import DotRankingLoss as DotRankingLoss
    from st_magnitude.losses import LearnableNormLoss as LearnableNormLoss
    from st_magnitude.losses import MagnitudeRankingLoss as MagnitudeRankingLoss
    from st_magnitude.losses import QNormRankingLoss as QNormRankingLoss
    from st_magnitude.losses import SIGRegInfoNCE as SIGRegInfoNCE
    from st_magnitude.losses import SimilarityMSELoss as SimilarityMSELoss
    from st_magnitude.losses import TempAggLoss as TempAggLoss
    from st_magnitude.losses import TempAggMRLLoss as TempAggMRLLoss
    from st_magnitude.losses import TempSpecMRLLoss as TempSpecMRLLoss
    from st_magnitude.losses.prior import DocumentPrior as DocumentPrior
    from st_magnitude.losses.regularizers import SIGReg as SIGReg
    from st_magnitude.saving.export import export as export
    from st_magnitude.saving.export import load as load
    from st_magnitude.serving.check import check_serving as check_serving
    from st_magnitude.similarity import COSINE as COSINE
    from st_magnitude.similarity import DNORM as DNORM
    from st_magnitude.similarity import DOT as DOT
    from st_magnitude.similarity import QNORM as QNORM
    from st_magnitude.similarity import Similarity as Similarity
    from st_magnitude.surgery.gradients import attach_grad_scale as attach_grad_scale
    from st_magnitude.surgery.gradients import cut_init as cut_init
    from st_magnitude.surgery.normalize import prepare as prepare
    from st_magnitude.surgery.normalize import strip_normalize as strip_normalize
    from st_magnitude.training.attach import attach as attach
    from st_magnitude.training.monitor import NormMonitor as NormMonitor

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__)
