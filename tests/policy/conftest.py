import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    # Nets of this size get slower with more threads, most of all beside other jobs.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
