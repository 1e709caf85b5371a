"""In-batch attention in the decoders of transformers, each against two passes with loops."""

import pytest
import revela_reference
import torch
from revela_reference import VOCABULARY, next_token_loss, padded, streams, unpadded
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from st_magnitude._upstream import supports_attention_interface
from st_magnitude.revela import attention
from st_magnitude.revela.attention import (
    Neighbours,
    in_batch_attention,
    set_in_batch_attention,
    two_streams,
)

LENGTHS = (4, 3, 1, 3, 5)
GROUPS = [0, 0, 1, 1, 1]

ROTARY = {"num_key_value_heads": 4, "partial_rotary_factor": 1.0}
LATENT = {"num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 6, "q_lora_rank": 8}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 5}
LATENT |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}

SUPPORTED = """afmoe apertus arcee aria_text bitnet ctrl cwm deepseek_v2 deepseek_v3 doge dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text glm glm4
    glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox helium hunyuan_v1_dense
    hunyuan_v1_moe jais2 jetmoe lfm2 llama minimax_m2 ministral ministral3 mistral
    mixtral moshi olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 starcoder2 youtu"""
QUICK = {"llama", "gemma", "gpt2", "opt", "glm", "lfm2", "phi3", "mixtral", "deepseek_v2"}
OPTIONS: dict[str, dict[str, object]] = {
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "granite": {"logits_scaling": 8.0},
    "lfm2": {"layer_types": ["full_attention"] * 2},
    "persimmon": ROTARY,
    "phi": ROTARY,
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu"), LATENT),
    "deepseek_v2": LATENT | {"v_head_dim": 18},  # values that are wider than the keys
}
LATER = " codegen gptj"  # transformers 5.24 computes their attention in its interface
NO_INTERFACE = """biogpt bloom codegen falcon_h1 gptj jamba mamba mpt nemotron_h openai-gpt
    qwen3_next stablelm xglm"""
REFUSED = {
    "does not compute attention through transformers' AttentionInterface": NO_INTERFACE,
    "In-batch attention reached . of 2 layers": "diffllama minimax nemotron recurrent_gemma",
    "scales or caps": "cohere cohere2 gemma2 granite nanochat",
    "attention sinks": "gpt_oss mimo_v2_flash",
    "attends in both directions": "bert",
    "does not separate its decoder": "llama4_text",
}
CASES_REFUSED = [(says, name) for says, names in REFUSED.items() for name in names.split()]


def decoder(family: str, **options: object) -> PreTrainedModel:
    """A random decoder in float64, with large weights."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers does not have {family}")
    sizes: dict[str, object] = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    lm = revela_reference.decoder(family, **sizes | OPTIONS.get(family, {}) | options)
    lm.set_experts_implementation("eager")  # the fused product of experts does not take float64
    return lm


def first_batch(lm: PreTrainedModel) -> None:
    set_in_batch_attention(lm)
    ids, mask = padded([torch.tensor([3, 4]), torch.tensor([5, 6, 7])])
    two_streams(lm, ids, Neighbours(torch.ones(2, 2, dtype=torch.float64), mask))


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, rotations and routers stay in float64, which transformers computes in float32."""
    to, widen = Tensor.to, Tensor.float
    softmax = nn.functional.softmax

    def kept(tensor: Tensor, *args: object, **options: object) -> Tensor:
        if tensor.dtype == torch.float64 and args == (torch.float32,):
            return tensor
        return to(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", kept)
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else widen(x))
    monkeypatch.setattr(
        nn.functional, "softmax", lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim)
    )


CASES = [
    pytest.param(name, True, marks=() if name in QUICK else pytest.mark.slow)
    for name in (SUPPORTED + LATER).split()
]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(("family", "v_norm"), [*CASES, ("llama", False)])
def test_architecture_is_equation_3_to_8(family: str, v_norm: bool, monkeypatch) -> None:
    """States, losses of both streams, and their gradients, where document 1 reads nobody."""
    monkeypatch.setattr(attention, "TOKENS_PER_CHUNK", 4)
    torch.manual_seed(0)
    lm = decoder(family)
    if family in LATER and not supports_attention_interface(lm):
        pytest.skip("this version of transformers computes its attention elsewhere")
    documents = [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]
    groups = torch.tensor(GROUPS)
    others = (groups[:, None] == groups) & ~torch.eye(5, dtype=torch.bool)
    similarity = torch.rand(5, 5, dtype=torch.float64) * others
    similarity[1, 0] = 0.0
    trained = [parameter for parameter in lm.parameters() if parameter.requires_grad]
    leaves = [similarity.requires_grad_(), *trained]
    e, h = streams(lm, documents, similarity, v_norm)
    assert max((one - other).detach().abs().max() for one, other in zip(e, h, strict=True)) > 0.1
    expected = next_token_loss(lm, h, documents) + 0.3 * next_token_loss(lm, e, documents)
    wanted = torch.autograd.grad(expected, leaves, allow_unused=True)
    assert wanted[0].abs().max() > 1e-3

    set_in_batch_attention(lm)
    ids, mask = padded(documents)
    found = two_streams(lm, ids, Neighbours(similarity, mask, v_norm=v_norm))
    for states, reference in zip(found, (e, h), strict=True):
        for one, other in zip(unpadded(states, mask), reference, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    auxiliary, loss = (attention.next_token_loss(lm, x, ids, mask) for x in found)
    loss = loss + 0.3 * auxiliary
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("says", "family"), CASES_REFUSED)
def test_architecture_is_refused_by_name(says: str, family: str) -> None:
    """When attaching, or in the first batch if it shows only there."""
    lm = decoder(family)
    if family in NO_INTERFACE.split() and supports_attention_interface(lm):
        pytest.skip("a later version of transformers computes its attention there")
    with pytest.raises(ValueError, match=says) as refusal:
        first_batch(lm)
    assert type(lm).__name__ in str(refusal.value)


def test_convolutions_between_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="reached 1 of 2 layers of Lfm2ForCausalLM"):
        first_batch(decoder("lfm2", layer_types=["full_attention", "conv"]))


# --- what in-batch attention leaves alone, and what it refuses ------------------------------------


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def lm():
    model = decoder("llama")
    set_in_batch_attention(model)
    return model


def test_generation_and_plain_calls_are_not_touched(lm) -> None:
    plain = decoder("llama")
    ids = documents()[0][None]
    torch.testing.assert_close(lm(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(lm.generate(ids, **options), plain.generate(ids, **options))


def test_pairs_that_are_left_out_do_not_matter(lm, monkeypatch) -> None:
    """A softmax so peaked that most weights are below 1e-7: float32 does not see the difference."""
    docs = documents()
    generator = torch.Generator().manual_seed(2)
    scores = 25.0 * torch.randn(5, 5, dtype=torch.float64, generator=generator)
    weights = scores.fill_diagonal_(-torch.inf).softmax(-1)
    ids, mask = padded(docs)
    assert sum(map(len, Neighbours(weights, mask).read)) <= 10  # of 20
    _, sparse = two_streams(lm, ids, Neighbours(weights, mask))
    monkeypatch.setattr(attention, "SPARSE_BELOW", -1.0)
    _, exact = two_streams(lm, ids, Neighbours(weights, mask))
    assert torch.allclose(exact, sparse, rtol=0, atol=2e-6)
    assert not torch.allclose(exact, sparse, rtol=0, atol=1e-14)


def test_bfloat16_autocast_stays_near_float32() -> None:
    model = decoder("llama").float()
    set_in_batch_attention(model)
    ids, mask = padded(documents())
    weights = torch.full((5, 5), 0.25)
    _, exact = two_streams(model, ids, Neighbours(weights, mask))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, half = two_streams(model, ids, Neighbours(weights, mask))
    assert torch.isfinite(half).all()
    both = half[mask.bool()].float(), exact[mask.bool()]
    assert torch.nn.functional.cosine_similarity(*both, dim=-1).min() > 0.995


@pytest.mark.parametrize("v_norm", [True, False])
def test_zero_values_and_huge_scores_stay_finite(v_norm: bool) -> None:
    query = 20 * torch.randn(3, 2, 4, 8)
    value = torch.zeros(3, 2, 4, 8, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0]] * 3)
    neighbours = Neighbours(torch.full((3, 3), 0.5), mask, v_norm=v_norm)
    result = in_batch_attention(query, query, value, neighbours)
    (gradient,) = torch.autograd.grad(result.sum(), value)
    assert (result == 0).all()
    assert torch.isfinite(gradient).all()


def test_the_loss_of_documents_of_one_token_is_zero(lm) -> None:
    ids, mask = torch.full((2, 5, 1), 1)
    assert attention.next_token_loss(lm, torch.randn(5, 1, 24, dtype=torch.float64), ids, mask) == 0


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaModel is not a causal decoder"):
        set_in_batch_attention(decoder("llama").model)
    ids, mask = padded(documents())
    model = decoder("llama")
    with pytest.raises(ValueError, match="reached 0 of 2 layers"):  # without set_in_batch_attention
        two_streams(model, ids, Neighbours(torch.ones(5, 5), mask))
