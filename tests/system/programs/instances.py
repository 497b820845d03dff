"""Host collectives between instances; what each found is printed as one line of JSON."""

import json
import sys

import horovod.popart as hvd
import numpy as np
import popart
import popdist
import popdist.popart


def numbers() -> dict[str, object]:
    rank, count = popdist.getInstanceIndex(), popdist.getNumInstances()
    total = np.arange(5, dtype=np.float32) * (rank + 1)
    popdist.allReduceSum(total)
    half = np.full(3, 1000.5 * (rank + 1), np.float16)
    popdist.allReduceSum(half, "half")
    large = np.full(1 << 20, rank, np.int32)
    popdist.allReduceSum(large)
    root = np.array([rank * 10, 7], np.int64)
    popdist.broadcast(root, count - 1)
    popdist.barrier()
    found: dict[str, object] = {
        "total": total.tolist(),
        "half": half.tolist(),
        "large": [int(large.min()), int(large.max())],
        "gathered": popdist.allGather(np.array([rank, rank * rank])).tolist(),
        "root": root.tolist(),
    }
    some = {0, count - 1}
    found["some"] = popdist.execute_on_instances(some, lambda: popdist.allReduceSum(np.array([1.0])).tolist())
    found["again"] = popdist.execute_on_instances(some, lambda: popdist.allGather(np.array(rank)).tolist())
    popdist.synchronize()
    return found


def mpi() -> dict[str, object]:
    """The same instances as mpi4py shows them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, count = comm.Get_rank(), comm.Get_size()
    losses = np.array([rank, 0.5], np.float32)
    table = np.empty((count, 2), np.float32) if rank == 0 else None
    comm.Gather(losses, table, root=0)
    best = np.empty(2, np.float32)
    comm.Allreduce([losses, MPI.FLOAT], [best, MPI.FLOAT], op=MPI.MAX)
    mine = np.empty(1, np.int32)
    comm.Scatter(np.arange(count, dtype=np.int32) if rank == 1 else None, mine, root=1)
    comm.Barrier()
    note = comm.bcast({"seed": (7, b"x"), "table": np.eye(2)} if rank == 0 else None)
    return {
        "rank": [rank, count, comm.rank, comm.size, MPI.COMM_SELF.size],
        "gathered": None if table is None else table.tolist(),
        "best": best.tolist(),
        "mine": mine.tolist(),
        "note": [list(note), note["seed"][0], note["table"].tolist()],
        "objects": comm.allgather("ab"[: rank + 1]),
        "sum": comm.allreduce(rank + 0.5),
    }


def weights() -> list[float]:
    builder = popart.Builder()
    rank = popdist.getInstanceIndex()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [1, 2]))
    w = builder.addInitializedInputTensor(np.full((2, 2), rank, np.float32))
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    local = popdist.getNumLocalReplicas()
    options = popdist.popart.configureSessionOptions(popart.SessionOptions())
    hvd.init()
    session = hvd.DistributedTrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(1, []),
        loss=loss,
        optimizer=popart.SGD({"defaultMomentum": (0.5, True)}),
        deviceInfo=popart.DeviceManager().createOfflineIPUDevice({"numIPUs": local}),
        userOptions=options,
    )
    hvd.broadcast_weights(session, root_rank=hvd.size() - 1)
    found = {w: np.empty((2, 2), np.float32)}
    session.readWeights(popart.PyWeightsIO(found))
    return found[w].ravel().tolist()


if __name__ == "__main__":
    popdist.init()
    if sys.argv[1:] == ["absent"]:
        if popdist.getInstanceIndex() == popdist.getNumInstances() - 1:
            sys.stdin.read()
        else:
            popdist.barrier()
    elif sys.argv[1:] == ["differ"]:
        popdist.allReduceSum(np.zeros(2 + popdist.getInstanceIndex(), np.float32))
    else:
        found = numbers() | {"weights": weights(), "mpi": mpi()}
        sys.stdout.write(json.dumps(found) + "\n")
