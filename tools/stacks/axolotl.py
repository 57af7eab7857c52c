"""axolotl: its plugin."""

import copy

from stacks.common import Checked, agreed, fused, gradients, llama, tokens


def axolotl() -> Checked:
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    manager = PluginManager.get_instance()
    manager.register("onchip.integrations.axolotl.OnchipPlugin")
    fields = merge_input_args()[1].model_fields
    model, ids = llama(), tokens()
    plain = copy.deepcopy(model)
    manager.post_model_build(DictDefault({"onchip_z_loss": 0.0}), model)
    made = []
    for x in (model, plain):
        loss = x(input_ids=ids, labels=ids).loss
        loss.backward()
        made.append([loss.detach(), *gradients(x)])
    fused(model)
    options = sum(name.startswith("onchip") for name in fields)
    how = (
        f"a Llama patched through its `PluginManager`, loss and gradients: {agreed(*made):.0e}; its config class takes "
        f"the {options} options"
    )
    return "`BasePlugin.post_model_build`, `get_input_args`", how
