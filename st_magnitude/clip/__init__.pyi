from .evaluation import evaluate_retrieval as evaluate_retrieval
from .loss import PRESETS as PRESETS
from .loss import AsymmetricClipLoss as AsymmetricClipLoss
from .model import rescale_output as rescale_output
from .model import unnormalize as unnormalize
