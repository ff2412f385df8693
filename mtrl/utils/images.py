"""Images in messages: a part of a message holds an image as a data URL of PNG or JPEG bytes, so that a message stays
plain JSON, and a trajectory that is saved and read again has the same image.

Only data URLs are read: a message comes from an environment, and must not make mtrl open a file or a network address.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mtrl.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.ImageFile import ImageFile

    Pixels = NDArray[np.uint8]

PNG, JPEG = "data:image/png;base64,", "data:image/jpeg;base64,"
SHOWN = "[image]"
"""Text that stands for an image where only text can be shown."""
OTHER_FORMS = ("image_url", "input_image", "video", "audio", "input_audio", "file")
"""Types of parts that show something in the forms of other programs."""
LARGEST = 2**24
"""Maximum number of pixels of an image, since a small file can describe a very large image."""


def image_part(pixels: Pixels) -> dict[str, str]:
    """Return the part of a message that shows an image.

    Args:
        pixels: [height, width, 3] uint8 values of red, green and blue.

    Raises:
        ValueError: the array has another shape or dtype.
    """
    return {"type": "image", "image": PNG + base64.b64encode(png(pixels)).decode()}


def png(pixels: Pixels) -> bytes:
    """Return [height, width, 3] uint8 pixels as the bytes of a PNG file (PNG specification, 3rd edition): truecolour,
    8 bits, without filters. The same pixels give the same bytes in every process with the same zlib.

    Raises:
        ValueError: the array has another shape or dtype.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != "uint8" or not pixels.size:
        raise ValueError(f"an image is uint8 [height, width, 3], and this array is {pixels.dtype} {pixels.shape}")
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks, strict=True)))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def size_of(image: str) -> tuple[int, int]:
    """Return the height and width of an image in a message, in pixels, without decoding them.

    Raises:
        ValueError: the text is no data URL of a PNG or JPEG file, the image is larger than `LARGEST` pixels, or it has
            16 bits for each of them.
    """
    with _opened(image) as file:
        return file.height, file.width


def pixels_of(image: str) -> Pixels:
    """Return the pixels [height, width, 3] of an image in a message. What is transparent becomes white.

    Raises:
        ValueError: as for `size_of`, or the pixels cannot be decoded.
    """
    import numpy as np
    from PIL import Image

    with _opened(image) as file:
        if file.has_transparency_data:
            return np.array(Image.alpha_composite(Image.new("RGBA", file.size, "white"), file.convert("RGBA")))[..., :3]
        return np.array(file.convert("RGB"))


@contextmanager
def _opened(image: str) -> Iterator[ImageFile]:
    """Open an image in a message. Errors of its file within the context are a `ValueError`."""
    from PIL import Image, UnidentifiedImageError

    head = next((head for head in (PNG, JPEG) if isinstance(image, str) and image.startswith(head)), None)
    if head is None:
        raise ValueError(f"an image in a message is {str(image)[:60]!r}; it must begin with {PNG} or {JPEG}")
    try:
        file = Image.open(io.BytesIO(base64.b64decode(image[len(head) :], validate=True)), formats=("PNG", "JPEG"))
        if file.width * file.height > LARGEST:
            raise ValueError(f"an image of {file.width} x {file.height} pixels is larger than {LARGEST:,} pixels")
        if file.mode.startswith("I"):  # Pillow would cut the values instead of scaling them
            raise ValueError("an image has 16 bits for each pixel; show one with 8 bits")
        yield file
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image in a message cannot be read ({error}); give the bytes of a PNG file") from error


def refuse_other_parts(messages: Iterable[Mapping[str, Any]]) -> None:
    """Refuse parts of messages that show something in another form than `image_part`, which templates and renderers
    would leave out silently.

    Raises:
        UserError: there is such a part.
    """
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))
    for part in parts:
        if part.get("type") in OTHER_FORMS or ("image" in part and part.get("type") != "image"):
            raise UserError(
                f"a message holds a part of type {part.get('type')}, which is not supported; an image is {{'type': "
                f"'image', 'image': '{PNG}…'}} (mtrl.utils.images.image_part)"
            )


def content_text(content: Any) -> str:
    """Return the content of a message as text: parts are joined, and `[image]` stands for an image."""
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    return "" if content is None else str(content)


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        return SHOWN if part.get("type") == "image" else str(part.get("text", ""))
    return str(part)
