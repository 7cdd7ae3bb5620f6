"""GPT-2: a decoder-only transformer whose output weights are its token embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; the defaults are GPT-2 small over bytes."""

    vocab_size: int = 256
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    bias: bool = True

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd is {self.n_embd}; give a multiple of n_head, which is {self.n_head}")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.projection = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position look at itself and at those before it."""
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return functional.dropout(self.projection(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Block(nn.Module):
    """Attention and a perceptron, each normalized before and added to what it was given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.perceptron = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Mix along the positions, then along the channels."""
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocabulary)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.apply(self._initialize)
        # Each block adds twice to the residual stream, whose variance would grow with the depth.
        for name, parameter in self.named_parameters():
            if name.endswith(("projection.weight", "perceptron.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each one of ``tokens``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        # The tied weight is used twice rather than registered twice: the state dict names it once.
        return functional.linear(self.norm(x), self.tokens.weight)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Decay what multiplies, matrices and embeddings; leave biases and norms."""
        # Not by shape: FSDP1 shows each rank its parameters flat.
        vectors = {p for module in self.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
        vectors |= {p for name, p in self.named_parameters() if name.endswith("bias")}
        groups = (
            {"params": [p for p in self.parameters() if p not in vectors], "weight_decay": weight_decay},
            {"params": [p for p in self.parameters() if p in vectors], "weight_decay": 0.0},
        )
        return [group for group in groups if group["params"]]

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, seed: int) -> bytes:
        """Continue ``prompt``; drawn from a generator of its own, so that training's stays where it is."""
        was_training = self.training
        self.eval()
        device = self.tokens.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(length):
            logits = self(tokens[:, -self.config.block_size :])[0, -1] / 0.8
            drawn = torch.multinomial(logits.float().softmax(0), 1, generator=generator)
            tokens = torch.cat((tokens, drawn[None]), dim=1)
        self.train(was_training)
        return bytes(tokens[0].tolist())
