"""NeMo Automodel: its losses."""

import torch
from stacks.common import Checked, agreed, gradients, llama, tokens


def nemo() -> Checked:
    from nemo_automodel.components.loss.loss import build_loss_module
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.loss.utils import calculate_loss

    from onchip.integrations.nemo import OnchipCrossEntropy

    labels = tokens().index_fill(1, torch.tensor([3]), -100)
    made = []
    for loss_fn in (build_loss_module(OnchipCrossEntropy), MaskedCrossEntropy()):
        model = llama()
        out = model(input_ids=tokens(), output_hidden_states=True)
        loss = calculate_loss(
            loss_fn,
            model=model,
            logits=out.logits,
            labels=labels,
            hidden_states=out.hidden_states[-1],
            num_label_tokens=30,
        )
        loss.backward()
        made.append([loss.detach(), *gradients(model)])
    how = f"its `calculate_loss` of a Llama, against `MaskedCrossEntropy`, loss and gradients: {agreed(*made):.0e}"
    return "`LinearCrossEntropy`, by its subclass `ChunkedCrossEntropy`", how
