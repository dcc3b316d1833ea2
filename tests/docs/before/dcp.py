"""What DCP takes for granted: a state of tensors, and a directory that DCP wrote."""

import torch.distributed.checkpoint as dcp

from tests.docs.before.training import model

state = {"model": model.state_dict()}
dcp.save(state, checkpoint_id="/mnt/dcp/step100")
