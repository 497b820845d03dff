"""A small GPT divided over two IPUs without a pipeline: trained, then asked for the next words."""

import poptorch
import torch

WORDS, WIDTH, LENGTH = 11, 16, 8


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32), torch.nn.GELU(), torch.nn.Linear(32, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return poptorch.recomputationCheckpoint(x + self.mlp(x))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens, labels=None):
        with poptorch.Block("start", ipu_id=0):
            x = self.words(tokens) + self.places(torch.arange(LENGTH))
            x = self.layers[0](x)
        with poptorch.Block("end", ipu_id=1):
            x = self.layers[1](x)
            logits = poptorch.serializedMatMul(
                x, self.words.weight.t(), poptorch.MatMulSerializationMode.OutputChannels, WORDS
            )
            if labels is None:
                return logits
            return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main():
    torch.manual_seed(0)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    model = Gpt()
    training = poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.02))
    inference = poptorch.inferenceModel(model, options)
    for step in range(60):
        first = torch.randint(0, WORDS, (16, 1))
        row = (first + torch.arange(LENGTH + 1)) % WORDS
        loss = float(training(row[:, :-1], row[:, 1:])[1])
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.3f}")
    tokens = torch.arange(LENGTH).reshape(1, -1)
    following = inference(tokens)[0, -1].argmax().item()
    print("after 0 to 7 comes", following)
    assert following == LENGTH % WORDS
    torch.testing.assert_close(inference(tokens), model(tokens), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
