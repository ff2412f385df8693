"""Images in messages: the same pixels after they were written and read, and no file or address is opened."""

import base64
import io
import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from PIL import Image

from mtrl.errors import UserError
from mtrl.types import images_in
from mtrl.utils.images import JPEG, LARGEST, PNG, content_text, image_part, pixels_of, png, refuse_other_parts

PICTURE = np.zeros((2, 2, 3), np.uint8)
PIXELS = arrays(np.uint8, (3, 5, 3))


@settings(max_examples=20, deadline=None)
@given(PIXELS)
def test_pixels_survive_a_message_and_other_programs_read_them(pixels):
    message = json.loads(json.dumps({"role": "user", "content": [image_part(pixels)]}))
    (image,) = images_in([message])
    assert (pixels_of(image) == pixels).all()
    assert (np.array(Image.open(io.BytesIO(png(pixels)))) == pixels).all()


def test_images_of_messages_are_in_order_and_text_has_none():
    first, second = (image_part(np.full((2, 2, 3), value, np.uint8)) for value in (1, 2))
    text = {"type": "text", "text": "see "}
    messages = [
        {"role": "system", "content": "data:image/png;base64,"},
        {"role": "user", "content": [first, text, second]},
        {"role": "assistant", "content": None},
    ]
    assert images_in(messages) == [first["image"], second["image"]]
    assert [content_text(message["content"]) for message in messages] == [PNG, "[image]see [image]", ""]


def test_jpeg_is_read_as_well():
    file = io.BytesIO()
    Image.fromarray(np.full((8, 16, 3), 200, np.uint8)).save(file, "JPEG")
    assert abs(pixels_of(JPEG + base64.b64encode(file.getvalue()).decode()).astype(int) - 200).max() < 4


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("/etc/passwd", "must begin with data:image/png"),
        ("http://example.org/a.png", "must begin with data:image/png"),
        (7, "must begin with data:image/png"),
        (PNG + "!!!", "cannot be read"),
        (PNG + base64.b64encode(b"GIF89a" + bytes(20)).decode(), "cannot be read"),
        (PNG + base64.b64encode(png(np.zeros((4, 4, 3), np.uint8))[:40]).decode(), "cannot be read"),
    ],
)
def test_other_images_are_refused(image, said):
    with pytest.raises(ValueError, match=said):
        pixels_of(image)


def as_png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return PNG + base64.b64encode(file.getvalue()).decode()


def test_what_is_transparent_is_white_and_16_bits_are_refused():
    half = Image.new("RGBA", (2, 1), (10, 20, 30, 255))
    half.putpixel((1, 0), (10, 20, 30, 0))
    assert pixels_of(as_png(half)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    with pytest.raises(ValueError, match="16 bits"):
        pixels_of(as_png(Image.fromarray(np.full((2, 2), 30000, np.uint16))))


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "video", "video": "v"},
             {"type": "text", "text": "a", "image": "data:image/png;base64,"}],
)  # fmt: skip
def test_parts_that_would_be_left_out_are_refused(part):
    refuse_other_parts([{"role": "user", "content": ["a", {"type": "text", "text": "b"}, image_part(PICTURE)]}])
    with pytest.raises(UserError, match=f"part of type {part['type']}, which is not supported"):
        refuse_other_parts([{"role": "user", "content": "a"}, {"role": "user", "content": [part]}])


def test_a_small_file_of_a_huge_image_is_refused():
    side = int(LARGEST**0.5) + 1
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    file = b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    with pytest.raises(ValueError, match="larger than"):
        pixels_of(PNG + base64.b64encode(file).decode())


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.uint8), np.zeros((2, 2, 3)), np.zeros((0, 2, 3), np.uint8)])
def test_only_colour_images_are_written(array):
    with pytest.raises(ValueError, match="an image is uint8"):
        png(array)
