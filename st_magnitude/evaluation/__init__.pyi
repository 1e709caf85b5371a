from .compression import CompressionCell as CompressionCell
from .compression import CompressionEvaluator as CompressionEvaluator
from .hybrid import HybridEvaluator as HybridEvaluator
from .hybrid import reciprocal_rank_fusion as reciprocal_rank_fusion
from .lexical import bm25_run as bm25_run
from .magnitude import MagnitudeEvaluator as MagnitudeEvaluator
