"""What counts as a right answer, for each built-in reward."""

from __future__ import annotations

import concurrent.futures
import time

import pytest

from vime_rollout.rewards import RewardError, RewardInput, exact, math, numeric

ALL = [exact, numeric, math]
NUMBERS = [numeric, math]


def score(reward, response, answer, **fields):
    return reward(RewardInput(response=response, answer=answer, prompt_id="p", **fields))


@pytest.mark.parametrize("reward", ALL)
@pytest.mark.parametrize(
    "response",
    [
        "5",
        " 5\n",
        "Answer: 5",
        r"Answer: \boxed{5}",
        r"So the answer is \boxed{5}.",
        r"The final answer is $\boxed{5}$.",
        r"\fbox{5}",
        r"\boxed 5",
        r"\boxed{\text{5}}",
        r"\boxed{\boxed{5}}",
    ],
)
def test_a_right_answer_counts_however_it_is_marked(reward, response):
    assert score(reward, response, "5") == 1.0
    assert score(reward, response, r"\boxed{5}") == 1.0
    assert score(reward, response, "6") == 0.0


@pytest.mark.parametrize("reward", NUMBERS)
@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\dfrac{1}{2}}", "0.5"),
        (r"\boxed{\tfrac12}", r"\frac{1}{2}"),
        (r"\boxed{-\frac{3}{4}}", "-0.75"),
        (r"\boxed{5\text{ cm}}", "5"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{12,345,678}", "12345678"),
        (r"\boxed{1234}", "1,234"),
        (r"\boxed{50\%}", "50\\%"),
        ("Answer: 3.0", "3"),
        ("Answer: -7", "-7"),
    ],
)
def test_spellings_of_one_number_are_equal(reward, response, answer):
    assert score(reward, response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{x = 12}", "12"),
        (r"\boxed{2\frac{1}{2}}", "2.5"),
        (r"\boxed{3 \times 10^{4}}", "30000"),
        ("1.5e3", "1500"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{\$18}", "18"),
        (r"\boxed{16\text{ cm}^2}", "16"),
        (r"\boxed{1 234 567}", "1234567"),
        (r"\boxed{\text{The value is 42}}", "42"),
        ("first 3, then 4, hence 7", "7"),
        ("\u22125", "-5"),
        ("#### 1,000", "1000"),
    ],
)
def test_numeric_reads_numbers_with_names_units_and_percent(response, answer):
    assert score(numeric, response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5^5}", "5"),
        (r"\boxed{2+3}", "5"),
        (r"\boxed{3, 5}", "5"),
        (r"\boxed{3 or 5}", "5"),
        (r"\boxed{5!}", "5"),
        (r"\boxed{x_5}", "5"),
        (r"\boxed{\frac{5}{0}}", "5"),
        (r"\boxed{1e999999999}", "5"),
        (r"\boxed{}", "0"),
        ("", "0"),
        ("no number", "0"),
        ("50", "0.5"),
        ("12,34", "1234"),
    ],
)
def test_numeric_neither_evaluates_nor_takes_several(response, answer):
    assert score(numeric, response, answer) == 0.0


def test_numeric_tolerances():
    item = RewardInput(response="3.1416", answer="3.14159265")
    assert numeric(item) == 0.0
    assert numeric(item, relative_tolerance=1e-4) == 1.0
    assert numeric(item, absolute_tolerance=1e-4) == 1.0
    assert numeric(item, absolute_tolerance=1e-6) == 0.0


@pytest.mark.parametrize("reward", ALL)
def test_of_two_boxes_the_last_one_counts(reward):
    assert score(reward, r"\boxed{3} no, \boxed{5}", "5") == 1.0
    assert score(reward, r"\boxed{5} no, \boxed{3}", "5") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "want"),
    [
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{\df{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\dfrac{\sqrt{3}}{2}", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{x^2}", "x^3", 0.0),
        (r"\boxed{\text{east}}", r"\text{east}", 1.0),
        (r"\boxed{\pi}", r"\pi", 1.0),
    ],
)
def test_math_compares_expressions(response, answer, want):
    assert score(math, response, answer) == want


@pytest.mark.parametrize("reward", ALL)
def test_empty_sets_and_empty_boxes_earn_nothing(reward):
    for response in (r"\boxed{\emptyset}", r"\boxed{\varnothing}", r"\boxed{\{\}}", r"\boxed{}", r"\boxed{ }", ""):
        assert score(reward, response, "5") == 0.0


def test_an_empty_set_is_right_where_it_is_the_answer():
    assert score(math, r"\boxed{\emptyset}", r"\emptyset") == 1.0
    assert score(math, r"\boxed{\varnothing}", r"\emptyset") == 1.0
    assert score(math, r"\boxed{5}", r"\emptyset") == 0.0


@pytest.mark.parametrize("reward", ALL)
def test_reasoning_does_not_count_and_unfinished_reasoning_earns_nothing(reward):
    assert score(reward, r"<think>\boxed{3}</think>\boxed{5}", "5") == 1.0
    assert score(reward, r"<think>maybe \boxed{5}", "5") == 0.0
    assert score(reward, r"maybe \boxed{5}", "5", prompt_text="assistant\n<think>\n") == 0.0
    assert score(reward, r"hm </think> \boxed{5}", "5", prompt_text="assistant\n<think>\n") == 1.0
    assert score(reward, r"\boxed{5}", "5", prompt_text="assistant\n<think>\n\n</think>\n\n") == 1.0
    assert score(reward, r"<think>a</think><think>\boxed{5}", "5") == 0.0


@pytest.mark.parametrize("reward", ALL)
def test_code_in_an_answer_never_runs(reward, tmp_path):
    target = tmp_path / "ran"
    for code in (
        f"__import__('pathlib').Path('{target}').touch()",
        f"exec(\"open('{target}', 'w')\")",
        f"().__class__.__base__.__subclasses__()[0] or open('{target}','w')",
    ):
        for response in (code, f"\\boxed{{{code}}}", f"Answer: {code}", f"${code}$"):
            assert score(reward, response, "5") == 0.0
    assert not target.exists()


@pytest.mark.parametrize("reward", ALL)
def test_threads_score_as_the_main_thread_does(reward):
    items = [RewardInput(response=f"Answer: \\boxed{{{n}}}", answer="5") for n in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(reward, items)) == [reward(item) for item in items] == [float(n == 5) for n in range(8)]


@pytest.mark.parametrize("reward", ALL)
def test_a_prompt_without_an_answer_is_an_error_not_a_zero(reward):
    with pytest.raises(RewardError, match="'p' has no answer"):
        score(reward, "5", None)


def test_a_reference_that_is_no_number_is_an_error():
    with pytest.raises(RewardError, match="'east' of prompt 'p' is no number"):
        score(numeric, "5", "east")


def test_exact_compares_text_and_may_ignore_case():
    assert score(exact, "East", "east") == 0.0
    assert exact(RewardInput(response="East", answer="east"), ignore_case=True) == 1.0
    assert exact(RewardInput(response="Answer: 5", answer="5"), extract=False) == 0.0
    assert score(exact, "0", "0") == 1.0
    assert score(exact, "132", "13") == 0.0


def test_towers_of_powers_end_at_once():
    assert score(math, r"\boxed{5^{5^{5^{5^5}}}}", "5") == 0.0
    assert score(math, "Answer: 9**9**9**9", "5") == 0.0


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "\\text{", "{", "answer ", "final ", "1,000 ", "\\boxed", "<think>", "\\frac{1}{", "1 "]
)
@pytest.mark.parametrize("reward", [exact, numeric])
def test_cheap_rewards_stay_cheap_on_long_responses(reward, piece):
    started = time.process_time()
    score(reward, piece * (200_000 // len(piece)), "5")
    assert time.process_time() - started < 1.0
