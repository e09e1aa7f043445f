"""Which slice of a DeepSeek-V4 model each rank holds. The only place that says so.

Split: attention by groups of the output projection, with the heads that feed them (one all-reduce
behind it); routed experts by number; the shared expert by channel, in whole scale blocks (one
all-reduce for both). Alike on all ranks: what turns the one key-value row per token into a cache
(wkv, compressors, indexer), since every head reads that same row, so that each rank keeps the whole
cache and must pick the same entries; the streams' mixing, the norms and the router, which are
small; the embedding, whose rows are looked up, not multiplied.

Only rank 0 has what follows the last layer or stage (head, Markov tables, confidences) and the
drafter's main_proj: it alone samples and projects, so that its logits are those of one process up
to the order of two sums per layer. A head split by vocabulary would be read faster, but every
forward would then wait for one more exchange.
"""

from dataclasses import dataclass

from common.detect.padding import shared_expert_padding
from common.errors import StartupError
from common.models.deepseek_v4.config import DeepseekV4Config
from common.parallel import Parallel


@dataclass(frozen=True)
class Shards:
    """One rank's slices, as ranges of the whole model's numbers."""

    config: DeepseekV4Config
    parallel: Parallel

    @property
    def leads(self) -> bool:
        """Whether this rank has what only rank 0 has."""
        return self.parallel.rank == 0

    @property
    def groups(self) -> range:
        """Groups of the output projection."""
        return self._even(self.config.o_groups)

    @property
    def heads(self) -> range:
        """Attention heads: those of the groups."""
        return self._even(self.config.num_heads)

    @property
    def head_rows(self) -> range:
        """Rows of wq_b."""
        return _times(self.heads, self.config.head_dim)

    @property
    def group_rows(self) -> range:
        """Rows of wo_a, which are the columns of wo_b."""
        return _times(self.groups, self.config.o_lora_rank)

    @property
    def experts(self) -> range:
        """Routed experts; where their number does not divide, some ranks have one more."""
        count, size, rank = self.config.num_experts, self.parallel.size, self.parallel.rank
        return range(count * rank // size, count * (rank + 1) // size)

    @property
    def shared_channels(self) -> range:
        """Channels of the shared expert's intermediate layer.

        As if it were padded to whole scale blocks per rank. The padding is zeros, which add
        nothing, so it is left out: a trailing rank may have fewer channels, or none.
        """
        size = self.config.moe_intermediate_size
        padding = shared_expert_padding(size, self.config.weight_block[0], self.parallel.size)
        per_rank = padding.padded_size // self.parallel.size
        start = self.parallel.rank * per_rank
        return range(min(start, size), min(start + per_rank, size))

    def _even(self, count: int) -> range:
        per_rank, rank = count // self.parallel.size, self.parallel.rank
        return range(rank * per_rank, (rank + 1) * per_rank)


def check_ranks(config: DeepseekV4Config, name: str, num_ranks: int) -> None:
    """Raises StartupError if the model `name` cannot be split over so many ranks."""
    groups = config.o_groups
    if groups % num_ranks:
        allowed = [str(n) for n in range(1, groups + 1) if groups % n == 0]
        raise StartupError(
            f"{name} cannot be split over {num_ranks} ranks: their number must divide its o_groups "
            f"{groups} and so its {config.num_heads} attention heads; torchrun --nproc-per-node "
            f"may be {', '.join(allowed)}"
        )


def _times(numbers: range, size: int) -> range:
    return range(numbers.start * size, numbers.stop * size)
