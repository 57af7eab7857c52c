import os

import pytest
import torch

from onchip.core import configs

# JAX would take three quarters of a GPU's memory at once, which PyTorch's tests and other processes need too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# The process's peak memory is measured with malloc's free blocks out of the way.  What JAX compiles leaves millions of
# those: after its tests a measurement took up to 20 s.  So these go first.
MEASURE_MEMORY = (
    "test_losses_memory.py",
    "test_measure.py",
    "test_bench.py",
    "test_bench_ops.py",
    "test_jsd_torch.py",
    "test_demo.py",
)


# Of the others what takes longest goes first, so that one worker doesn't end with it alone.
LONGEST = ("test_bench_losses.py",)


# Variants of tests that stand elsewhere too, by the ends of their names: `make test-all` runs them.
SLOW = (
    "integrations/test_transformers.py::test_two_processes",
    "test_demo.py::test_experts_in_a_loop_and_grouped",
    "test_demo.py::test_plain_stores_the_logits_and_onchip_does_not[jax]",
    "test_bench_losses.py::test_a_run[jax-linear_cross_entropy-bfloat16]",
    "test_bench_losses.py::test_nothing_is_imported_before_it_is_asked_for[jax]",
    "test_bench_losses.py::test_what_users_do_with_a_head[jax-frozen]",
    "test_fp8_bench.py::test_a_run[jax]",
    "test_gm_mosaic.py::test_layer[False]",
    "test_grouped_bench.py::test_steps[jax-0-forward]",
    "test_jsd_jax.py::test_chunks_change_nothing[none]",
    "test_llp_jax.py::test_many_chunks[hv-float16]",
    "test_mosaic_kernels.py::test_products[VH]",
    "test_mosaic_kernels.py::test_softmax_all_kept_in_scratch",
    "test_mosaic_backend.py::test_every_kind_of_plan[128-True-3-vh]",
    "test_mosaic_backend.py::test_labels_out_of_range_and_ignored[128]",
    "test_mosaic_backend.py::test_transforms[vmap]",
    "test_mosaic_backend.py::test_one_gradient_made_in_forward[wanted1-mean]",
    "test_jax_memory.py::test_the_formula_holds[(2048, 256, 16384)-recompute-16-{}-{}]",
    "test_jax_correctness.py::test_a_label_out_of_range_gives_nan_for_its_token[70-recompute]",
    "test_jax_correctness.py::test_a_label_out_of_range_gives_nan_for_its_token[-1-stash]",
    "test_jax_ops.py::test_scan[linear_jsd]",
    "test_jax_ops.py::test_nothing_leaks_from_ignored_tokens[cross_entropy]",
    *(f"64_bit_mode[{op}]" for op in ("log_probs", "jsd", "fp8_linear")),
    *(f"test_trainer_learns_the_same[{trainer}]" for trainer in ("rloo", "kto", "sft-lora")),
)


@pytest.hookimpl(tryfirst=True)  # before those are left out that a marker leaves out
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.endswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.path.name.endswith(LONGEST))
    items.sort(key=lambda item: not item.path.name.endswith(MEASURE_MEMORY))


@pytest.fixture(autouse=True)
def seed():
    """Tests that draw their own numbers draw the same ones every time."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def free_gpu_memory(request):
    """What a big test had on the GPU is there for other processes' tests, and no tape of a plan that it patched."""
    yield
    configs.clear_cache()
    if request.node.get_closest_marker("gpu") and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture
def one_thread():
    """On a busy machine, threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    """The user's folder of tuned configs, empty."""
    monkeypatch.setattr(configs.platformdirs, "user_config_path", lambda app: tmp_path / "config" / app)
    configs.clear_cache()
    yield configs.user_folder()
    configs.clear_cache()


@pytest.fixture
def quiet_bench(monkeypatch):
    """Without the page, which takes longer than all else, and without a look at what else is running."""
    monkeypatch.setattr("onchip.bench.run.html_page", lambda document, name: "")
    monkeypatch.setattr("onchip.bench.environment._busy_cores", lambda: 0.0)
