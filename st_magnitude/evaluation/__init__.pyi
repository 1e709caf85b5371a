from .compression import CompressionCell as CompressionCell
from .compression import CompressionEvaluator as CompressionEvaluator
from .lexical import bm25_run as bm25_run
from .lexical import reciprocal_rank_fusion as reciprocal_rank_fusion
from .magnitude import MagnitudeEvaluator as MagnitudeEvaluator
