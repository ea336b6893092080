"""The command line, in the process of the tests."""

import importlib
import json
import re
import runpy
import sys

import pytest
from typer.testing import CliRunner

import soframe
from soframe.cli import app
from soframe.planning.hardware import Hardware
from soframe.registry import KINDS
from tests.planning.kit import CPU


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda *arguments: CliRunner().invoke(app, [str(item) for item in arguments])
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def succeeded(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


def failed(result, message):
    assert result.exit_code == 1, result.stdout
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


def misused(result, message):
    assert result.exit_code == 2, result.stdout
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_components_are_those_of_the_registry(invoke):
    read = json.loads(succeeded(invoke("components", "--json")))
    assert list(read) == list(KINDS)
    assert set(read["strategy"]) == set(soframe.available("strategy"))
    table = succeeded(invoke("components"))
    for name in (*read["solver"], *read["strategy"], "torch.nn.modules.linear.Linear"):
        assert name in table


def test_cite_prints_bibtex_of_components_and_of_soframe(invoke):
    out = succeeded(invoke("cite", "soap-muon", "soap"))
    assert re.findall(r"^@\w+\{(\w+),$", out, re.MULTILINE) == [
        "vyas2024soap",
        "jordan2024muon",
        "soframe",
    ]
    read = json.loads(succeeded(invoke("cite", "owner-local", "--json")))
    assert list(read) == ["zhang2022scalable", "soframe"]
    assert read["zhang2022scalable"]["journal"] == "IEEE Transactions on Cloud Computing"
    assert succeeded(invoke("cite", "soframe")) == succeeded(invoke("cite", "sharded"))
    failed(invoke("cite", "kfca"), "no references for ['kfca']; there are: adamw, ")
    failed(invoke("cite", "--import", "nowhere"), "nor in the current folder")


def test_cite_imports_modules_of_the_current_folder(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "parts_of_here.py").touch()
    succeeded(invoke("cite", "soap", "--import", "parts_of_here"))


def test_cite_lists_names_and_keys(invoke):
    read = json.loads(succeeded(invoke("cite", "--json")))
    assert read["method"]["ekfac"] == ["george2018ekfac"]
    table = succeeded(invoke("cite"))
    for name in (*read["method"], *read["strategy"], "trust-region", "pauloski2021kaisa", "none"):
        assert name in table


MODELS = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3))

instance = nn.Sequential(nn.Linear(5, 6))
number = 3

def with_argument(width):
    return nn.Linear(width, 1)

def talking():
    print("2 layers")
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

def text():
    return "model"

def empty():
    return nn.Sequential(nn.LayerNorm(2))

def attending():
    return nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 9))
"""


@pytest.fixture
def models(tmp_path, invoke):
    (tmp_path / "mymodels.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import soframe_does_not_exist")
    (tmp_path / "raises.py").write_text("1 / 0")
    return invoke


def test_inspect_shows_every_parameter_and_the_placement(models):
    arguments = ["mymodels:make", "--world-size", 4, "--strategy", "mem-opt"]
    arguments += ["--kind", "regression"]
    out = succeeded(models("inspect", *arguments))
    assert "4 of 6 parameters in 2 block(s)" in out
    assert re.search(r"\nparameter  +shape  +block .*\n[- ]+\n0.weight ", out)
    assert "1.weight" in out
    assert "placement 'mem-opt' on 4 rank(s)" in out
    assert "\n\noptimizer = torch.optim.SGD(" in out
    assert "measured in: docs/benchmarks/ordinary.md" in out


def test_json_is_alone_where_a_model_prints(models):
    for command in ("inspect", "plan"):
        arguments = ["mymodels:talking", "--json"]
        if command == "plan":
            arguments += ["--input", "8x3"]
        result = models(command, *arguments)
        assert json.loads(succeeded(result))
        assert "2 layers" in result.stderr


def test_inspect_plans_the_recommended_method_or_another(models):
    read = json.loads(succeeded(models("inspect", "mymodels:make", "--json")))
    assert read["recommendation"]["kind"] == "dense"
    assert read["recommendation"]["memory"] == {"mem-opt": read["ranks"][0]["total"]}
    assert read["parameters"][0]["method"].startswith("soap-normuon")
    arguments = ["mymodels:make", "--kind", "regression", "--json"]
    read = json.loads(succeeded(models("inspect", *arguments)))
    assert read["parameters"][0]["method"] == "kfac / inverse"
    read = json.loads(succeeded(models("inspect", "mymodels:make", "--method", "soap", "--json")))
    assert read["parameters"][0]["method"].startswith("soap")


def test_inspect_begins_with_bytes_and_needs_no_memory_for_weights(models):
    arguments = ["inspect", "mymodels:make", "--method", "kfac"]
    every = [succeeded(models(*arguments, *option)) for option in ([], ["--meta"])]
    first, planned = (out.splitlines() for out in every)
    assert first[0] == "4 of 6 parameters in 2 block(s), 78% of the trained weights"
    assert first[1] == planned[1] == "at most 1.39 kB on a rank: factors 696 B, second order 696 B"
    assert "solver 'inverse' by default" in first[2]


def test_inspect_as_json_has_every_parameter_and_every_rank(models):
    arguments = ["mymodels:make", "--world-size", 2, "--strategy", "mem-opt", "--json"]
    arguments += ["--method", "kfac"]
    read = json.loads(succeeded(models("inspect", *arguments)))
    assert [(row["parameter"], row["block"]) for row in read["parameters"]] == [
        ("0.weight", "0"),
        ("0.bias", "0"),
        ("1.weight", None),
        ("1.bias", None),
        ("2.weight", "2"),
        ("2.bias", "2"),
    ]
    assert read["strategy"] == "mem-opt"
    assert [set(block["owners"]) for block in read["blocks"].values()] == [{"A", "G"}, {"A", "G"}]
    (first,), (second,) = (block["gradient_workers"] for block in read["blocks"].values())
    assert {first, second} == {0, 1}
    assert read["blocks"]["0"]["sources"] == [first, first]
    assert len(read["ranks"]) == 2
    # Each rank has the factors of one layer, and the data of their solver: in single precision.
    assert read["ranks"][first]["factors"] >= 4 * (5**2 + 8**2)
    assert all(rank["total"] == sum(rank.values()) - rank["total"] for rank in read["ranks"])


def test_inspect_shows_layers_of_every_kind(models):
    out = succeeded(models("inspect", "mymodels:make", "--method", "kfac", "--all-layers"))
    assert "6 of 6 parameters in 3 block(s)" in out


@pytest.mark.parametrize(("path", "shape"), [("Model", "3x3"), ("instance", "6x5")])
def test_inspect_takes_classes_and_models(models, path, shape):
    assert shape in succeeded(models("inspect", f"mymodels:{path}"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mymodels"], "'mymodels' is neither MODULE:CALLABLE"),
        (["mymodels:make", "--kind", "cnn"], "there is no kind 'cnn' of model: choose one of "),
        (["nowhere:make"], "there is no module 'nowhere'"),
        (["broken:make"], "could not be imported: No module named 'soframe_does_not_exist'"),
        (["raises:make"], "importing module 'raises' raised ZeroDivisionError"),
        (["mymodels:absent"], "there is no 'absent' in module 'mymodels'"),
        (["mymodels:number"], "is not a callable, but a int"),
        (["mymodels:with_argument"], "missing 1 required positional argument: 'width'"),
        (["mymodels:text"], "returned a str, not a torch.nn.Module"),
        (["mymodels:empty", "--method", "kfac"], "there is nothing to precondition"),
        (["mymodels:make", "--strategy", "best-opt"], "no strategy 'best-opt'; registered: "),
    ],
)
def test_inspect_says_what_is_wrong(models, arguments, message):
    failed(models("inspect", *arguments), message)


@pytest.fixture
def profile(tmp_path):
    CPU.save(tmp_path / "cpu.json")
    return tmp_path / "cpu.json"


@pytest.mark.slow
def test_plan_ends_with_a_line_to_paste(models, profile):
    arguments = ["plan", "mymodels:make", "--ranks", 4, "--hardware", profile, "--input", "16x4"]
    out = succeeded(models(*arguments, "--memory", "1MB", "--kind", "regression"))
    assert out.startswith("planned for 4 rank(s), cpu\n")
    assert "\nstrategy=" in out
    assert "\nstatistics every 10 and solves every 100 steps\nit is the " in out
    assert " of the ones within 1 MB" in out
    assert "backward" in out


@pytest.mark.slow
def test_plan_takes_the_recommended_method_with_its_intervals_or_another(models, profile):
    def planned(*options):
        arguments = ["mymodels:attending", "--hardware", profile, "--json", *options]
        (row,) = json.loads(succeeded(models("plan", *arguments)))["rows"]
        return tuple(row["intervals"]), row["memory"].get("state", 0)

    every, state = planned()
    assert every == (1, 10)
    # Two moments of AdamW for the table and the last layer, of SOAP's for the other.
    assert state >= 4 * 2 * (9 * 4 + 8 * 9)
    assert planned("--method", "kfac") == ((10, 100), 0)
    assert planned("--method", "soap-normuon")[1] < state  # the others are not trained by it
    assert planned("--method", "soap-normuon", "--auxiliary", "adamw") == (every, state)


@pytest.mark.parametrize("ranks", [1, 8])
def test_recommend_inspect_and_plan_have_one_strategy_and_one_memory(models, ranks):
    seen = json.loads(
        succeeded(models("inspect", "mymodels:attending", "--ranks", ranks, "--json"))
    )
    advice = soframe.recommend(sys.modules["mymodels"].attending(), ranks=ranks)
    arguments = ["mymodels:attending", "--ranks", ranks, "--input", "8x16:int64", "--json"]
    planned = json.loads(succeeded(models("plan", *arguments)))
    strategy = "mem-opt" if ranks > 1 else "comm-opt"
    assert ('strategy="mem-opt"' in advice.call) == (ranks > 1)
    if ranks > 1:
        assert seen["strategy"] == strategy
    assert planned["chosen"] == f"strategy={strategy!r}"
    held = max(rank["total"] for rank in seen["ranks"])
    assert advice.memory[advice.strategy] == held
    (row,) = (row for row in planned["rows"] if row["call"] == planned["chosen"])
    assert row["memory"]["held"] == held
    if ranks == 1:
        in_halves = json.loads(succeeded(models("plan", *arguments, "--amp")))
        assert in_halves["fixed"]["activations"] == planned["fixed"]["activations"] / 2


def test_a_kind_can_be_named(models):
    for command in ("inspect", "plan"):
        read = json.loads(succeeded(models(command, "mymodels:make", "--kind", "pinn", "--json")))
        rows = read["parameters"] if command == "inspect" else read["rows"]
        if command == "inspect":
            assert read["recommendation"]["kind"] == "pinn"
            assert rows[0]["method"].startswith("soap")
        else:
            assert rows[0]["memory"]["state"] > 0


@pytest.mark.parametrize("option", ["--ranks", "--world-size"])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_the_number_of_ranks_has_one_spelling(models, command, option):
    read = json.loads(succeeded(models(command, "mymodels:make", option, 2, "--json")))
    assert (len(read["ranks"]) if command == "inspect" else read["ranks"]) == 2
    misused(models(command, "mymodels:make", option, 0), option)


@pytest.mark.parametrize("option", ["--statistics-every", "--solve-every"])
@pytest.mark.parametrize("value", [0, -3])
def test_plan_takes_intervals_that_are_positive(models, option, value):
    misused(models("plan", "mymodels:make", option, value), option)


@pytest.mark.parametrize("setting", ["solver", "dtype"])
def test_plan_varies_no_solver_and_no_dtype(models, setting):
    """Nor recommends inverses of bfloat16 factors: what may vary is named."""
    arguments = ["mymodels:make", "--vary", "stagger", "--vary", setting]
    result = models("plan", *arguments)
    misused(result, "Invalid value for '--vary'")
    misused(result, f"'{setting}' is not one of 'background', 'stagger'")
    assert result.stdout == ""


def test_plan_ends_with_code_2_if_nothing_fits(models):
    result = models("plan", "mymodels:make", "--memory", "1B")
    assert result.exit_code == 2
    assert "\n! comm-opt" in result.stdout
    assert "error: no strategy fits into memory_limit=1 bytes a rank" in result.stderr
    assert "raise the limit" in result.stderr


@pytest.mark.slow
def test_plan_as_json_and_as_a_figure(models, profile, tmp_path):
    figure = tmp_path / "plots" / "front.png"
    arguments = ["mymodels:make", "--ranks", 2, "--hardware", profile, "--solve-every", 10]
    options = ["--vary", "stagger", "--figure", figure, "--json"]
    read = json.loads(succeeded(models("plan", *arguments, *options)))
    assert read["ranks"] == 2
    assert {row["option"]["solve_every"] for row in read["rows"]} == {10}
    assert {row["option"]["stagger"] for row in read["rows"]} == {True, False}
    assert {row["timing"]["phases"]["forward"] for row in read["rows"]} == {0}
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_plan_lists_workloads_and_hardware(invoke):
    out = succeeded(invoke("plan", "--list"))
    for name in ("bert-large", "llama-70b", "h100-ib", "rtx2080ti-ib100"):
        assert name in out


def test_plan_measures_this_machine(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("soframe.cli.measure_hardware", lambda device: CPU)
    result = invoke("plan", "--measure", tmp_path / "here.json")
    assert result.exit_code == 0
    assert f"profile: {tmp_path / 'here.json'}" in result.stderr
    assert Hardware.load(tmp_path / "here.json") == CPU


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "'' is neither MODULE:CALLABLE"),
        (["gpt2-huge"], "nor a workload of soframe plan: resnet50, resnet101, bert-large, gpt2, "),
        (["mymodels:make", "--hardware", "abacus"], "no hardware profile 'abacus'"),
        (["mymodels:make", "--memory", "much"], "'much' is not a number of bytes"),
        (["mymodels:make", "--input", "4by4"], "'4by4' is not a shape"),
        (["mymodels:make", "--input", "4:text"], "'4:text' is not a shape"),
        (["mymodels:make", "--input", "16x5"], "the forward pass cannot be planned"),
        (["mymodels:make", "--method", "magic"], "no method 'magic'"),
    ],
)
def test_plan_says_what_is_wrong(models, arguments, message):
    failed(models("plan", *arguments), message)


def test_the_version(invoke):
    assert succeeded(invoke("--version")) == f"soframe {soframe.__version__}\n"
    assert "completion" not in succeeded(invoke("--help"))  # the command leaves the shell alone


def test_an_error_leaves_with_one_line_and_no_traceback(tmp_path, monkeypatch, capsys):
    """Of `python -m soframe`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["soframe", "metrics", "."])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("soframe", run_name="__main__")
    assert ended.value.code == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert "Is a directory: '.'" in error


def test_a_missing_library_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "soframe.cli")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("soframe.cli")
    expected = "soframe: missing: typer. Install it with: pip install 'soframe[cli]'"
    assert ended.value.code == expected  # Python prints it, and exits with 1
