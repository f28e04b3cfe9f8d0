"""Writes any model that pagedjax loads as a Hugging Face folder in f32, for engines that read nothing else.

python benchmarks/peers/export_hf.py smollm2-135m-instruct OUT_FOLDER
"""

import sys

from pagedjax.models.convert import convert

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    convert(sys.argv[1], sys.argv[2], dtype="float32", format="safetensors")
    print(sys.argv[2])
