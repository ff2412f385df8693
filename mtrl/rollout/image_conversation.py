"""The tokens of an episode whose messages hold images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtrl.engines.base import ImagePrompt
from mtrl.models.vision import ImageProcessor, processor_of
from mtrl.rollout.conversation import Codec, Conversation
from mtrl.types import Generation, Message, Turn, images_in
from mtrl.utils.images import refuse_other_parts


class ImageCodec(Codec):
    """A codec of a model that reads images. The chat template writes one placeholder for each image, and the image
    processor determines how many there are.

    Placeholders in the text of a message are escaped like all control tokens, and those that the policy samples are
    ordinary tokens.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        processor = processor_of(self.tokenizer)
        assert processor is not None
        self.processor: ImageProcessor = processor

    def check_images(self, messages: Sequence[Message]) -> None:
        """Accept images, and refuse those in the form of another program."""
        refuse_other_parts(messages)

    def render(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        return self.processor.expand(super().render(messages, tools), images_in(messages))

    def extend(
        self,
        prompt_ids: list[int],
        action_ids: list[int],
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int] | None:
        extended = super().extend(prompt_ids, action_ids, messages, tools)
        if extended is None:
            return None
        known = len(prompt_ids) + len(action_ids)
        return extended[:known] + self.processor.expand(extended[known:], images_in(messages))

    def places(self, ids: Sequence[int], images: Sequence[str], start: int) -> tuple[tuple[int, str], ...]:
        """Return the index of the first placeholder of each image, and the image.

        Args:
            ids: ids that hold the placeholders of these images and no others.
            start: index of the first of these ids in the whole context.

        Raises:
            ValueError: the placeholders are not those of the images.
        """
        found = [index for index, token in enumerate(ids) if token == self.processor.placeholder]
        places, used = [], 0
        for image in images:
            run = found[used : used + (count := self.processor.tokens(image))]
            if len(run) < count or run[-1] - run[0] != count - 1:
                raise ValueError(f"the {count} placeholders of an image are not together in the context")
            places.append((start + run[0], image))
            used += count
        if used != len(found):
            raise ValueError(f"{len(found) - used} placeholders of the context stand for no image")
        return tuple(places)


class ImageConversation(Conversation):
    """Conversation whose messages may hold images, in which every turn is its own message."""

    codec: ImageCodec

    def __init__(self, codec: ImageCodec, messages: list[Message], tools: list[dict[str, Any]] | None = None):
        super().__init__(codec, messages, tools)
        self._images = codec.places(self.prompt_ids, images_in(messages), 0)
        """The images of `prompt_ids`, with their places."""

    @property
    def prompt(self) -> Any:
        return ImagePrompt(self.prompt_ids, self._images)

    def add_action(self, generation: Generation) -> Turn:
        self._images_before = self._images
        return super().add_action(generation)

    def _continue(self, rendered: list[int]) -> bool:
        known = len(self._sampled_after) + len(self.turns[-1].action_ids)
        extends = super()._continue(rendered)
        if extends:
            self._images = self._images_before + self.codec.places(self._new_ids, images_in(self.observation), known)
        else:
            self._images = self.codec.places(rendered, images_in([*self._messages, *self.observation]), 0)
        return extends
