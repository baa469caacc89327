import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from trained_models import trained
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
base = GPT2LMHeadModel(config)
tuned = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, fan_in_fan_out=True))
before = {name: value.clone() for name, value in tuned.state_dict().items()}
expected = trained(tuned, "runs/a").state_dict()
...  # fragment 2
found = model.state_dict()
assert found.keys() == expected.keys()
assert all(torch.equal(expected[name], value) for name, value in found.items())
assert not all(torch.equal(before[name], value) for name, value in found.items())
