"""Models that read images: log-probs and gradients of a batch are those of plain Transformers, sequence by sequence."""

import copy

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from mtrl.command.compose import compose
from mtrl.command.vision_checks import reads_images
from mtrl.errors import UserError
from mtrl.models.preparation import checkpoint_gradients
from mtrl.models.renderer import TemplateRenderer, TinyVisionRenderer
from mtrl.models.sft import MixedOptimizer, to_image_example, update
from mtrl.models.tiny import save
from mtrl.models.tiny_vision import make_vision_model
from mtrl.models.vision import (
    ImageProcessor,
    has_vision,
    image_inputs,
    load_processor,
    prepare_vision,
    processor_of,
    tower,
)
from mtrl.rollout.image_conversation import ImageConversation
from mtrl.trainer.data.batching import micro_batches
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.loading import is_vision_model, load_peer
from mtrl.trainer.update.policy import Policy
from mtrl.types import Demonstration, FinishReason, Generation, Trajectory, images_in
from mtrl.utils.images import image_part, pixels_of
from tests.vision_models import FAMILIES, SIZES, codec, conversations, picture, plain_logits, shown, tokenizer


def trajectory_of(observations, actions):
    """The trajectory of a conversation whose turns sample `actions`."""
    conversation = ImageConversation(codec(), observations[0])
    for number, ids in enumerate(actions):
        if number:
            conversation.add_observation(observations[number])
        conversation.add_action(Generation(ids, [-1.0] * len(ids), FinishReason.STOP, [(0, len(ids))]))
    return Trajectory("t", "g", 0, conversation.turns)


@pytest.fixture(scope="module")
def trajectories():
    """Trajectories with zero to two images in each observation. The policy samples a placeholder in some turns."""
    placeholder, end = processor_of(tokenizer()).placeholder, tokenizer().eos_token_id
    found = []
    for index, observations in enumerate(conversations()):
        actions = [[30 + index, *([placeholder] * (index % 2)), 40 + turn, end] for turn in range(len(observations))]
        found.append(trajectory_of(observations, actions))
        found[-1].index = index
    assert {len(sample.images) for t in found for sample in samples_of(t)} == {0, 1, 2, 3}
    return found


def samples_of(trajectory):
    return trajectory_samples(trajectory, [1.0] * len(trajectory.turns))


def alone(model, sample):
    """The log-probs of the sampled tokens of one sample by plain Transformers, and the gradients of their sum."""
    placeholder = processor_of(tokenizer()).placeholder
    marks = [
        token == placeholder and not sampled for token, sampled in zip(sample.token_ids, sample.loss_mask, strict=True)
    ]
    fresh, logits = plain_logits(model, sample.token_ids, marks, sample.images)
    chosen = torch.tensor(sample.loss_mask)[1:]
    logprobs = logits[:-1].log_softmax(-1)[chosen]
    found = logprobs.gather(1, torch.tensor(sample.token_ids)[1:][chosen, None])[:, 0]
    found.sum().backward()
    return found.detach(), {name: value.grad for name, value in fresh.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_its_sequences_alone(family, trajectories):
    model = FAMILIES[family]()
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    policy = Policy(model, tokenizer())
    batches = micro_batches(samples, [np.ones(len(sample.token_ids)) for sample in samples], 100)
    assert 1 < len(batches) < len(samples)
    expected, gradients = {}, {}
    for row, sample in enumerate(samples):
        expected[row], own = alone(model, sample)
        gradients = {name: gradients.get(name, 0) + own.get(name, 0) for name in {*gradients, *own}}
    for batch in batches:
        logprobs, _ = policy.logprobs(batch)
        torch.testing.assert_close(logprobs, torch.cat([expected[row] for row in batch.rows]), atol=1e-5, rtol=0)
        logprobs.sum().backward()
    own = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert own.keys() == gradients.keys() and any("visual" in name for name in own)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_have_the_same_gradients(family, trajectories):
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    (batch,) = micro_batches(samples, [np.ones(len(sample.token_ids)) for sample in samples], 10_000)
    gradients = []
    for recomputes in (False, True):
        model = FAMILIES[family]()
        if recomputes:
            checkpoint_gradients(model)
        Policy(model, tokenizer()).logprobs(batch)[0].sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-6, msg=name)


def test_chunked_logits_are_the_same(trajectories):
    model = FAMILIES["qwen3_vl"]()
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    (batch,) = micro_batches(samples, [np.ones(len(sample.token_ids)) for sample in samples], 10_000)
    whole, parts = (Policy(model, tokenizer(), max_logits=count).logprobs(batch)[0] for count in (2**27, 2**10))
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


def test_a_sampled_placeholder_is_an_ordinary_token():
    """The policy's `<|image_pad|>` keeps its embedding and takes one position, beside an image of several tokens."""
    processor = processor_of(tokenizer())
    trajectory = trajectory_of([[shown(picture(0))]], [[processor.placeholder] * 3 + [40]])
    (sample,) = samples_of(trajectory)
    assert sum(token == processor.placeholder for token in sample.token_ids) == 3 + 6 and len(sample.images) == 1
    model = FAMILIES["qwen3_vl"]()
    (batch,) = micro_batches([sample], [np.ones(len(sample.token_ids))], 100)
    torch.testing.assert_close(
        Policy(model, tokenizer()).logprobs(batch)[0], alone(model, sample)[0], atol=1e-5, rtol=0
    )


def test_a_frozen_tower_has_no_gradient_and_a_copy_works_like_the_model(trajectories):
    model = prepare_vision(make_vision_model(SIZES, tokenizer(), 0), freeze=True)
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    (batch,) = micro_batches(samples, [np.ones(len(sample.token_ids)) for sample in samples], 10_000)
    logprobs, _ = Policy(model, tokenizer()).logprobs(batch)
    logprobs.sum().backward()
    assert all(value.grad is None for value in tower(model).parameters())
    assert all(value.grad is not None for value in model.model.language_model.parameters())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()  # the copy has its own weights and placeholders
    torch.testing.assert_close(Policy(twin, tokenizer()).logprobs(batch)[0], logprobs, atol=0, rtol=0)


def test_placeholders_without_an_image_are_refused():
    patches = processor_of(tokenizer()).patches(picture(0)["image"])
    with pytest.raises(ValueError, match="5 placeholders stand for 1 images of 6 tokens"):
        image_inputs(torch.tensor([[False] + [True] * 5]), [patches])


def test_renderers_show_one_placeholder_for_each_image():
    messages = [
        {"role": "system", "content": "go up"},
        shown("left ", picture(0), picture(1, 8, 8), " right"),
        {"role": "assistant", "content": "a wall"},
        {"role": "user", "content": "now"},
    ]
    tiny, any_template = TinyVisionRenderer(tokenizer()), TemplateRenderer(tokenizer())
    ids = tiny.render_ids(messages, add_generation_prompt=True)
    assert ids == any_template.render_ids(messages, add_generation_prompt=True)
    assert ids == tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    processor = processor_of(tokenizer())
    assert ids.count(processor.placeholder) == 2
    assert codec().render(messages).count(processor.placeholder) == 6 + 1


@pytest.mark.parametrize("name", ["Qwen3VLProcessor", "Qwen2_5_VLProcessor"])
def test_tokens_are_those_of_the_models_own_processor(name, monkeypatch):
    """The processor of the family expands the same template to the same ids and types, and cuts the same patches. It
    gets no processor of videos, which would need torchvision."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda self, name, value: type(value))
    own = processor_of(tokenizer())
    whole = getattr(transformers, name)(own.processor, tokenizer(), None, chat_template=tokenizer().chat_template)
    messages = [shown("go", picture(0), picture(1, 8, 32), "now"), {"role": "assistant", "content": "up"}, shown("x")]
    images = images_in(messages)
    text = whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    theirs = whole(text=[text], images=[pixels_of(image) for image in images], return_tensors="pt")
    ids = torch.tensor([codec().render(messages)])
    assert torch.equal(theirs["input_ids"], ids)
    found = image_inputs(ids == own.placeholder, [own.patches(image) for image in images])
    assert found.keys() == {"mm_token_type_ids", "pixel_values", "image_grid_thw"}
    for name, value in found.items():
        assert torch.equal(torch.as_tensor(theirs[name]), value.to(torch.as_tensor(theirs[name]).dtype)), name


def test_imitation_learns_from_the_image_alone():
    """The brightness of the picture is the right word: without it, the mean loss of word and end is log(2) / 2 or
    more."""
    processor, renderer = processor_of(tokenizer()), TinyVisionRenderer(tokenizer())
    examples = []
    for value, word in ((0, "up"), (255, "down")):
        part = image_part(np.full((16, 24, 3), value, np.uint8))
        examples.append(
            to_image_example(renderer, processor, Demonstration([shown(part), {"role": "assistant", "content": word}]))
        )
    assert all(sum(example.mask) >= 2 and len(example.ids) == len(example.mask) for example in examples)
    model = make_vision_model(SIZES, tokenizer(), 0)
    optimizer = MixedOptimizer(model, 0.02, 1e-2)
    losses = [update(model, examples, optimizer) for _ in range(30)]
    assert losses[-1] < 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_read_by_transformers(family, tmp_path):
    from transformers import AutoModelForImageTextToText

    model = FAMILIES[family]()
    save(model, tokenizer(), tmp_path / "model")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    assert has_vision(loaded.config) and type(loaded) is type(model)
    own, theirs = model.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
    image = picture(3)["image"]
    processor = load_processor(str(tmp_path / "model"), tokenizer())
    assert torch.equal(processor.patches(image).values, processor_of(tokenizer()).patches(image).values)


@pytest.mark.parametrize("height", [1, 3])
def test_a_flat_image_is_not_transposed(height):
    """An array of height 3 could also be three channels of an image."""
    flat = processor_of(tokenizer()).patches(picture(0, height, 24)["image"])
    _, rows, columns = flat.grid
    assert columns > rows


def test_patches_are_kept_up_to_a_number_of_bytes(monkeypatch):
    processor = ImageProcessor(processor_of(tokenizer()).processor, tokenizer())
    images = [picture(seed)["image"] for seed in range(4)]
    size = processor.patches(images[0]).values.nbytes
    monkeypatch.setattr("mtrl.models.vision.CACHED_BYTES", 2 * size)
    computed = []
    monkeypatch.setattr("mtrl.models.vision.pixels_of", lambda image: computed.append(image) or pixels_of(image))
    for index in (0, 1, 0, 2, 0, 1):  # 1 is used before 0, so that 2 takes its place
        processor.patches(images[index])
    assert computed == [images[1], images[2], images[1]]


def test_a_folder_of_adapters_and_a_gguf_file_are_models_of_text(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "model.gguf").write_text("no JSON")
    for path, known in ((tmp_path, None), (tmp_path / "model.gguf", False)):
        config = OmegaConf.to_object(compose(["model=hf", f"model.path={path}"]))
        assert reads_images(config) is known and is_vision_model(config) is False


def test_a_reference_of_another_kind_is_refused(tmp_path, make_tiny_model):
    save(FAMILIES["qwen3_vl"](), tokenizer(), tmp_path)
    policy = make_tiny_model()
    policy.config.vocab_size = len(tokenizer())
    config = OmegaConf.to_object(compose(["model=hf", f"model.path={tmp_path}"]))
    with pytest.raises(UserError, match="algorithm.kl_reference=.* reads images and the policy text only"):
        load_peer(config, str(tmp_path), "algorithm.kl_reference", policy)


def test_the_number_of_tokens_needs_no_pixels():
    processor = ImageProcessor(Qwen2VLImageProcessorPil(), tokenizer())  # with the sizes of published models
    for height, width in ((1, 8), (30, 200), (333, 57), (1100, 900)):
        image = picture(0, height, width)["image"]
        assert processor.tokens(image) == processor.patches(image).tokens == len(processor.patches(image).values) // 4
