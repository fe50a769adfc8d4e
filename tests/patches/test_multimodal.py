"""Models with images retrieve in the text model and leave the vision tower alone."""
import pytest
import torch
import transformers
from cases import SIZES
from families import EXPERTS, LINEAR, SHARED, WINDOW
from models import prompts
from packaging.version import Version
from snapshot import snapshot
from transformers import AutoConfig, AutoModelForImageTextToText
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches._family import MULTIMODAL

FULL = dict(max_length=64, budget=64, sink=8, window=6, skip_layers=1, block_size=4)
IMAGE, START, END = 90, 92, 93
TOWER = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
CLIP = {**TOWER, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 16}
PIXTRAL = {**TOWER, "model_type": "pixtral", "image_size": 16, "patch_size": 8}
INTERN = {**TOWER, "image_size": [16, 16], "patch_size": [4, 4]}
QWEN_TOWER = dict(
    depth=2, hidden_size=32, embed_dim=32, num_heads=2, out_hidden_size=64, intermediate_size=32, patch_size=4,
    spatial_merge_size=2, temporal_patch_size=2, in_channels=3,
)  # fmt: skip
QWEN35_TOWER = {**QWEN_TOWER, "num_position_embeddings": 16}
QWEN = dict(
    vision_config=QWEN_TOWER, image_token_id=IMAGE, video_token_id=91, vision_start_token_id=START,
    vision_end_token_id=END,
    text_config={**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
)  # fmt: skip
LLAMA, MISTRAL, QWEN2 = ({**SIZES, "model_type": t, "sliding_window": None} for t in ("llama", "mistral", "qwen2"))
GEMMA = dict(
    vision_config={**TOWER, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8},
    text_config={**WINDOW, "model_type": "gemma3_text"}, mm_tokens_per_image=4, image_token_index=IMAGE,
    boi_token_index=START, eoi_token_index=END,
)  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
CONFIGS = {
    "gemma3": GEMMA,
    "internvl": dict(vision_config=INTERN, text_config=QWEN2, image_token_id=IMAGE, image_seq_length=4),
    "llava": dict(vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE, image_seq_length=4),
    "mistral3": dict(vision_config=PIXTRAL, text_config=MISTRAL, image_token_index=IMAGE, spatial_merge_size=1),
    "qwen2_vl": {**QWEN, "vision_config": {**QWEN_TOWER, "hidden_size": 64}},
    "qwen2_5_vl": {**QWEN, "vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [1], "window_size": 16}},
    "qwen3_5": {**QWEN, "vision_config": QWEN35_TOWER, "text_config": {**LINEAR, **ROPE}},
    "qwen3_5_moe": {
        **QWEN, "vision_config": QWEN35_TOWER, "text_config": {**EXPERTS, **LINEAR, **SHARED, **ROPE},
    },
    "qwen3_vl": {
        **QWEN, "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}  # fmt: skip


def tiny(kind: str):
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **CONFIGS[kind])).to(DEVICE).eval()


def inputs(kind: str, seed: int) -> dict:
    """Two prompts of unequal length with an image of four tokens each; `seed` draws the pixels."""
    ids, mask = prompts(2, 30)
    ids = ids.clamp(max=IMAGE - 1)
    ids[:, 19], ids[:, 20:24], ids[:, 24] = START, IMAGE, END
    g = torch.Generator().manual_seed(seed)
    if kind.startswith("qwen"):
        pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=g)
        more = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (ids == IMAGE).int()}
    else:
        pixels = torch.randn(2, 3, 16, 16, generator=g)
        more = {"image_sizes": torch.tensor([[16, 16]] * 2)} if kind == "mistral3" else {}
    more = {name: t.to(DEVICE) for name, t in {**more, "pixel_values": pixels}.items()}
    return {"input_ids": ids, "attention_mask": mask, **more}


def logits(model, given, kept=None):
    """Of a greedy generate(); `kept` takes the whole answer, with its cache."""
    options = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    out = model.generate(**given, **options)
    if kept is not None:
        kept.append(out)
    return torch.stack(out.logits)


def implementations(model):
    return {key: getattr(model.config, key)._attn_implementation for key in model.config.sub_configs}


def test_every_multimodal_family_has_a_case():
    assert set(CONFIGS) == set(MULTIMODAL)


def test_bidirectional_images_are_refused_and_text_is_accepted():
    """In gemma3 the tokens of an image see one another; its processor says of every token whether it is one."""
    model, given = tiny("gemma3"), inputs("gemma3", 1)
    images = (given["input_ids"] == IMAGE).long()
    words = {"input_ids": given["input_ids"].clamp(max=IMAGE - 1), "attention_mask": given["attention_mask"]}
    want = logits(model, {**words, "token_type_ids": torch.zeros_like(images)})
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        for types in ({}, {"token_type_ids": torch.zeros_like(images)}):
            torch.testing.assert_close(logits(model, {**words, **types}, kept := []), want, atol=1e-4, rtol=1e-4)
            steps = [(r.method, r.steps) for r in handle.report().layers]
            assert steps == [(m, 11) for m in ("window", "quest", "window", "quest")]
        with pytest.raises(NotImplementedError, match="no images whose tokens attend to each other in both directions"):
            logits(model, {**given, "token_type_ids": images}, kept)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "gemma3"])
def test_full_budget_is_dense_with_images(kind):
    if kind.startswith("qwen3_5") and Version(transformers.__version__) < Version("5.13"):
        pytest.skip("supported since transformers 5.13")
    model = tiny(kind)
    want, other = (logits(model, inputs(kind, seed)) for seed in (1, 2))
    before, had = snapshot(model), implementations(model)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        has = implementations(model)
        got = logits(model, inputs(kind, 1), kept := [])
        assert kept[0].past_key_values is handle._latest()
        methods = ["quest"] * 2 if kind.startswith("qwen3_5") else ["full", "quest", "quest"]  # the others are linear
        assert [(r.method, r.steps) for r in handle.report().layers] == [(m, 11) for m in methods]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert (want - other).abs().max() > 1e-3, "the image does not matter: this test could not fail"
    assert {key for key in had if had[key] != has[key]} == {"text_config"}, "the vision tower keeps its own"
    assert snapshot(model) == before
    assert implementations(model) == had


def test_a_small_budget_is_not_dense():
    model, given = tiny("llava"), inputs("llava", 1)
    want = logits(model, given)
    with torchsparsekv.patch(model, "quest", **{**FULL, "budget": 4, "sink": 4}):
        assert (logits(model, given) - want).abs().max() > 1e-3


@pytest.mark.parametrize("part", ["model", "model.language_model"])
def test_patching_only_the_text_model_is_refused(part):
    """It would be accepted and never seen by the whole model's generate()."""
    model = tiny("llava")
    before = snapshot(model)
    says = r"Model has no generate\(\): patch the whole model, not a part of it"
    with pytest.raises(NotImplementedError, match=says):
        torchsparsekv.patch(model.get_submodule(part), "quest", **FULL)
    assert snapshot(model) == before
