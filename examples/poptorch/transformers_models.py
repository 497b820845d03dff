"""Train a model of Hugging Face's transformers on IPUs: BERT, GPT-2, ViT or T5, small ones with random weights.

    python -m podrun.compat examples/poptorch/transformers_models.py bert
    podrun --num-replicas 2 --num-instances 1 examples/poptorch/transformers_models.py gpt2

The four lines that make a plain program one for IPUs are marked. The model's own loss is the loss: nothing else
changes.
"""

import sys

import poptorch  # 1
import torch
import transformers

STEPS, BATCH, LENGTH, WORDS = 8, 4, 16, 64
SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 64}


def bert(words: torch.Tensor) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **SMALL
    )
    mask = torch.ones_like(words)
    return transformers.BertForMaskedLM(config), {"input_ids": words, "attention_mask": mask, "labels": words}


def gpt2(words: torch.Tensor) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), {"input_ids": words, "labels": words}


def vit(words: torch.Tensor) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=WORDS,
        **SMALL,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(len(words), 3, 32, 32, generator=generator)
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": words[:, 0]}


def t5(words: torch.Tensor) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {"input_ids": words, "labels": words}


def main(name: str) -> list[float]:
    """Losses of a few steps on the same samples, which fall."""
    torch.manual_seed(0)
    words = torch.randint(1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    model, samples = {"bert": bert, "gpt2": gpt2, "vit": vit, "t5": t5}[name](words)
    model.train()
    options = poptorch.Options()  # 2
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=3e-3)  # 3: torch.optim.AdamW
    training = poptorch.trainingModel(model, options, optimizer)  # 4
    losses = []
    for step in range(STEPS):
        loss = training(**samples).loss
        losses.append(float(loss))
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bert")
