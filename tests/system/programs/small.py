"""An ordinary PopART program: trains a little linear model, ``small.py [STEPS] [HOW]``.

Prints what it reaches. On an error of the system it prints step, class, recovery action and how long the
step took.
HOW says how it is to end on its own: ``exit-before``, ``raise-before``, ``kill-during``, ``raise-during``,
``exit-after``: before, during or after it is attached. ``until:FILE``: once there is such a file, with the number of
its steps; until then it pauses after each step, so that what others do meanwhile has the processor.
"""

import os
import signal
import sys
import time

import numpy as np
import popart
import popdist
import popdist.popart

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30
HOW = sys.argv[2] if len(sys.argv) > 2 else ""
PAUSE_SECONDS = 0.02


def build():
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 8]), "x")
    w = builder.addInitializedInputTensor(np.full([8, 4], 0.1, np.float32), "w")
    return builder, x, builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)


def end(when):
    """End as HOW says, in the last instance only."""
    if HOW.endswith(when) and popdist.getInstanceIndex() == popdist.getNumInstances() - 1:
        if HOW.startswith("exit"):
            sys.exit(9)
        if HOW.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"ends {HOW}")


def main():
    end("before")
    builder, x, loss = build()
    options = popart.SessionOptions()
    popdist.popart.configureSessionOptions(options)
    with popdist.popart.getDevice() as device:
        print("attached", flush=True)
        session = popart.TrainingSession(
            fnModel=builder.getModelProto(),
            dataFlow=popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
            loss=loss,
            optimizer=popart.ConstSGD(0.01),
            deviceInfo=device,
            userOptions=options,
        )
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        data = {x: np.ones([popdist.getNumLocalReplicas(), 2, 8], np.float32)}
        for step in range(STEPS):
            started = time.monotonic()
            try:
                session.run(popart.PyStepIO(data, anchors))
            except popart.poplar_exception as error:
                action = getattr(error, "recoveryAction", None)
                name = action.name if action is not None else "none"
                print(
                    f"step {step} {type(error).__name__} {name} {time.monotonic() - started:.2f}", flush=True
                )
                raise
            if step == 3:
                print("stepping", flush=True)
                end("during")
            if HOW.startswith("until:"):
                time.sleep(PAUSE_SECONDS)
                if os.path.exists(HOW.removeprefix("until:")):
                    print(f"{step + 1} steps", flush=True)
                    break
    end("after")
    print("done", flush=True)


main()
