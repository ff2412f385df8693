"""Entry script of a SageMaker container, which runs once per rank (mtrl/sagemaker/container.py). Use
scripts/launch_sagemaker.py to start jobs."""

import sys
from pathlib import Path

ENTRY = Path(__file__).resolve()
CODE = ENTRY.parent.parent

if __name__ == "__main__":
    sys.path.insert(0, str(CODE))  # this code has priority over a copy in the image
    from mtrl.sagemaker.container import main

    main(CODE, ENTRY)
