"""What a SageMaker container runs, once per rank (mtrl/sagemaker/container.py); jobs are started elsewhere, by
scripts/launch_sagemaker.py."""

import sys
from pathlib import Path

ENTRY = Path(__file__).resolve()
CODE = ENTRY.parent.parent

if __name__ == "__main__":
    sys.path.insert(0, str(CODE))  # this code, not what the image may hold
    from mtrl.sagemaker.container import main

    main(CODE, ENTRY)
