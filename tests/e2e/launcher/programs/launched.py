"""Write down whether torch thinks that a launcher started this."""

import sys
from pathlib import Path

from torch import distributed

Path(sys.argv[1]).write_text(str(distributed.is_torchelastic_launched()))
