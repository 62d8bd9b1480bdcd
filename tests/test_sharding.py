"""Sharded tensors of ``torch.distributed``: each rank computes its own batch or heads."""

import subprocess
import sys

import torch

import parzen
from parzen.backends import cpu

RANKS = 2


def test_two_processes(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def main(rank: int, store: str) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.testing import assert_close

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def check(f, tensors, placements, result):
        whole = [x.requires_grad_() for x in tensors]
        cut = [
            distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
            for x, p in zip(tensors, placements, strict=True)
        ]
        expected, got = f(*whole), f(*cut)
        assert got.placements == (result,), got.placements
        grads = torch.autograd.grad(expected.sin().sum(), whole), torch.autograd.grad(got.sin().sum(), cut)
        assert_close(got.full_tensor(), expected)
        for wanted, grad in zip(*grads, strict=True):
            assert_close(grad.full_tensor(), wanted)

    def qkv(batch, heads, key_heads):
        return [torch.randn(batch, n, 6, 16) for n in (heads, key_heads, key_heads)]

    for axis in (0, 1):
        for name in ("biweight", "knn_gaussian?k=3"):

            def plain(q, k, v, name=name):
                return parzen.attention(q, k, v, kernel=name, is_causal=True)

            check(plain, qkv(2, 4, 4), [Shard(axis)] * 3, Shard(axis))

        def everything(q, k, v, bias, scale, slopes, alpha):
            options = {"kernel": parzen.kernel("entmax", alpha=alpha), "scale": scale, "alibi_slopes": slopes}
            return parzen.attention(q, k, v, bias, enable_gqa=True, **options)

        # What broadcasts is whole on each rank, and its gradient a sum.
        tensors = [
            *qkv(2, 4, 2),
            torch.randn(6, 6),
            torch.rand(4, 1) + 0.5,
            torch.rand(4),
            torch.rand(4) / 2 + 1.2,
        ]
        heads = Replicate() if axis == 0 else Shard(0)
        check(everything, tensors, [Shard(axis)] * 3 + [Replicate(), heads, heads, heads], Shard(axis))
    if cpu.info()["built"]:  # the reference does what torch does
        # Three key heads on two ranks would part a group of queries from its keys.
        check(
            lambda *x: parzen.attention(*x, enable_gqa=True, kernel="biweight"),
            qkv(1, 6, 3), [Shard(1)] * 3, Replicate(),
        )  # fmt: skip
        # Queries that are cut along their length are brought together.
        check(lambda *x: parzen.attention(*x, kernel="biweight"), qkv(1, 2, 2), [Shard(2)] * 3, Replicate())
    check(parzen.attention, qkv(2, 4, 4), [Shard(0)] * 3, Shard(0))
    check(lambda s: parzen.weights(s, "entmax?alpha=1.3"), [torch.randn(4, 9)], [Shard(0)], Shard(0))
    check(
        lambda q, k: parzen.attention_weights(q, k, kernel="biweight").weights,
        qkv(2, 4, 4)[:2], [Shard(0)] * 2, Shard(0),
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
