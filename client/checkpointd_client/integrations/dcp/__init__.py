"""torch.distributed.checkpoint (DCP) on a checkpointd root: a storage for `dcp.save`, `dcp.async_save` and `dcp.load`, and
DCP's own directories converted both ways.
"""

from checkpointd_client.integrations.dcp.exporting import export_dcp
from checkpointd_client.integrations.dcp.importing import import_dcp
from checkpointd_client.integrations.dcp.reader import CheckpointdReader
from checkpointd_client.integrations.dcp.writer import CheckpointdWriter

__all__ = ["CheckpointdReader", "CheckpointdWriter", "export_dcp", "import_dcp"]
