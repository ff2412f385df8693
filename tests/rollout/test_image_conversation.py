"""Conversations with images: sampled ids stay, placeholders are context, and each context names its images."""

import pytest

from mtrl.engines.base import ImagePrompt
from mtrl.errors import UserError
from mtrl.models.renderer import TemplateRenderer
from mtrl.rollout.conversation import Codec, SingleMessageConversation
from mtrl.rollout.image_conversation import ImageCodec, ImageConversation
from mtrl.trainer.data.samples import trajectory_samples
from mtrl.trainer.setup.connect import check_prompts
from mtrl.types import FinishReason, Generation, Trajectory, to_json, trajectory_from_dict
from tests.vision_models import codec, picture, shown, tokenizer

PAD = codec().processor.placeholder
END = tokenizer().eos_token_id


@pytest.fixture(params=["tiny", "template"])
def image_codec(request):
    """The codec of the tiny policy, and the same with the renderer of any chat template."""
    return codec() if request.param == "tiny" else ImageCodec(tokenizer(), TemplateRenderer(tokenizer()))


def sampled(*ids):
    return Generation(list(ids), [-1.0] * len(ids), FinishReason.STOP, [(0, len(ids))])


def test_turns_with_images_extend_the_sampled_ids(image_codec):
    first, second = picture(0), picture(1, 8, 8)
    conversation = ImageConversation(image_codec, [shown("go", first)])
    opening = conversation.prompt_ids
    assert opening.count(PAD) == 6 and conversation.prompt.images == ((opening.index(PAD), first["image"]),)
    conversation.add_action(sampled(40, PAD, PAD, END))
    conversation.add_observation([shown(second, "now")])
    prompt = conversation.prompt
    assert isinstance(prompt, ImagePrompt) and prompt.ids[: len(opening) + 4] == [*opening, 40, PAD, PAD, END]
    added = prompt.ids[len(opening) + 4 :]
    assert prompt.images[1] == (len(opening) + 4 + added.index(PAD), second["image"]) and added.count(PAD) == 1
    conversation.add_action(sampled(41, END))
    assert [turn.break_reason for turn in conversation.turns] == [None, None]
    (sample,) = trajectory_samples(Trajectory("t", "g", 0, conversation.turns), [1.0, 2.0])
    assert sample.token_ids == [*prompt.ids, 41, END] and sample.images == [first["image"], second["image"]]
    masks = [mask for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if token == PAD]
    assert masks == [False] * 6 + [True] * 2 + [False]


def test_the_observation_of_a_turn_can_be_replaced(image_codec):
    conversation = ImageConversation(image_codec, [shown(picture(0))])
    conversation.add_action(sampled(40, END))
    conversation.add_observation([shown(picture(1), picture(2))])
    conversation.add_observation([shown(picture(3))])
    assert [image for _, image in conversation.prompt.images] == [picture(0)["image"], picture(3)["image"]]


def test_after_a_break_the_whole_context_shows_all_images(image_codec, monkeypatch):
    """A renderer that cannot extend a conversation renders it again: the earlier image is in the new sample, and the
    placeholder that the policy sampled is gone, since its text is not encoded again as a control token."""
    first, second = picture(0), picture(1)
    conversation = ImageConversation(image_codec, [shown(first)])
    conversation.add_action(sampled(40, PAD, END))
    monkeypatch.setattr(type(image_codec.renderer), "bridge_to_next_turn", lambda *args, **options: None)
    conversation.add_observation([shown(second)])
    conversation.add_action(sampled(41, END))
    assert conversation.turns[1].break_reason is not None
    assert [image for _, image in conversation.prompt.images] == [first["image"], second["image"]]
    trajectory = Trajectory("t", "g", 0, conversation.turns)
    one, two = trajectory_samples(trajectory, [1.0, 1.0])
    assert one.images == [first["image"]] and two.images == [first["image"], second["image"]]
    assert two.token_ids.count(PAD) == 12


def test_text_that_names_a_placeholder_is_no_image(image_codec):
    conversation = ImageConversation(image_codec, [shown("<|vision_start|><|image_pad|><|vision_end|>", picture(0))])
    assert conversation.prompt_ids.count(PAD) == 6 and len(conversation.prompt.images) == 1


def test_a_trajectory_is_saved_with_its_images():
    import json

    conversation = ImageConversation(codec(), [shown(picture(0))])
    conversation.add_action(sampled(40, END))
    trajectory = Trajectory("t", "g", 0, conversation.turns)
    read = trajectory_from_dict(json.loads(to_json(trajectory)))
    assert read == trajectory and read.images_of(0) == [picture(0)["image"]]


def test_a_model_of_text_refuses_images(tiny_codec):
    with pytest.raises(UserError, match="holds an image, and only text is read here; take model=tiny_vision"):
        tiny_codec.render([shown(picture(0))])
    with pytest.raises(UserError, match="only text is read here"):
        tiny_codec.extend([1], [2], [shown("see", picture(0))])
    single = SingleMessageConversation(tiny_codec, [shown("see")])
    single.add_action(sampled(1, 2))
    with pytest.raises(UserError, match="only text is read here"):
        single.add_observation([shown(picture(0))])
    assert isinstance(tiny_codec, Codec)
    assert tiny_codec.render([shown("see")])  # text in parts is no image


def test_an_image_in_the_form_of_another_program_is_refused(tiny_codec):
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    for either in (tiny_codec, codec()):
        with pytest.raises(UserError, match="part of type image_url"):
            either.render([message])


def test_a_row_whose_image_cannot_be_read_is_named():
    row = {"id": "7", "prompt": [shown({"type": "image", "image": "data:image/gif;base64,AAAA"})]}
    with pytest.raises(UserError, match="row 7 cannot be shown to the model: an image in a message is"):
        check_prompts(codec(), [row], 1000)


def test_an_image_that_cannot_be_read_is_refused():
    broken = {"type": "image", "image": "data:image/png;base64,AAAA"}
    with pytest.raises(ValueError, match="cannot be read"):
        ImageConversation(codec(), [shown(broken)])
