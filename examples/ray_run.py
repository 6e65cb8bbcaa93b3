"""horovod.ray's RayExecutor with quantized gradients.

It runs an ordinary training function in Ray's actors.

python ray_run.py    # append another class of hvq to use it, such as EDEN
"""

import sys

import ray
from horovod.ray import RayExecutor

WORKERS = 2


def train(method):
    import horovod.torch as hvd
    import torch

    import horovod_quant.torch as hvq

    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)  # the workers share a machine
    images = torch.randn(4096, 64)
    labels = (images @ torch.randn(64, 10)).argmax(1)
    own_images, own_labels = images[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    compression = getattr(hvq, method)()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _step in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(own_images), own_labels).backward()
        optimizer.step()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
    weights = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return str(compression), accuracy, compression.stats().total.ratio, weights


if __name__ == "__main__":
    method = sys.argv[1] if len(sys.argv) > 1 else "GlobalQSGD"
    ray.init(num_cpus=WORKERS, include_dashboard=False)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=300), num_workers=WORKERS)
    executor.start()
    results = executor.run(train, args=[method])
    executor.shutdown()
    ray.shutdown()
    compression, accuracy, ratio, weights = results[0]
    assert all(result[3] == weights for result in results), "the workers have trained different models"
    print(f"{compression}: accuracy {accuracy:.1%}, {ratio:.1f}x less traffic", flush=True)
