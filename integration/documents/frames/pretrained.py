import torch
from trained_models import trained
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
expected = trained(GPT2LMHeadModel(config), "runs/a").state_dict()
...  # fragment 1
assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
