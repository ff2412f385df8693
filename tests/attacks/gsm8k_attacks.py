"""Hostile turns for gsm8k: expressions for the calculator, and ambiguous answers."""

from attack_kit import Attack, generate

CALC = "<calc>{{expression}}</calc>"
EXPRESSIONS = (
    "9**9**9", "9^9^9", "2<<999999999", "10**100", "fact(99999)", "99999!", "1e999", "1e308*1e308", "0x10", "0b1",
    "1_000",
    "1//0", "1%0", "1/0", "0/0", "1/(1-1)", "().__class__", "__import__('os').system('id')", "open('/etc/passwd')",
    "lambda: 1", "[1]*10**9", "'a'*10**9", "print(1)", "exit()", "max(1,2)", "1;2", "1,2", "1 2", "a", "π", "∞", "½",
    "²",
    "١+١", "１+１", "1+１", "१", "Ⅷ", "1‑1", "1−1", "1×1", "1÷1", "1\u00a0+1", "1\u200b+1", "\ud800", "\0", "1\0+1", "",
    " ",
    "+", "*", "/", "()", ")(", "(", ")", "1+", "+1*", "1**2", "1+*2", "--", "..", ".", "1..2", "1.2.3", "1.", ".5.",
    "<calc>1</calc>", "<calc>", "</calc", "1</calc><calc>2", "#", "##", "\n\n", "\x1b[2J", "<|end|>", "NaN", "inf",
    "True",
)  # fmt: skip
SIZED = (
    "{{nine}}*{{nine}}*{{nine}}", "{{open}}1{{close}}", "{{minus}}1", "{{one}}", "1{{plus}}", "1/{{three}}", "{{dots}}",
    "{{spaces}}1", "1{{times}}", "{{nine}}/{{three}}", "{{calcs}}", "{{ends}}", "1.{{nine}}", "{{calcs}}1{{ends}}",
)  # fmt: skip
ANSWERS = (
    "#### 1 #### 72", "#### 72 #### 1", "#### 1 or 72", "#### 72 or 1", "#### 72\n#### 73", "####72####", "##### 72",
    "### 72", "#### 7 2", "#### 72e0", "#### 7.2e1", "#### 0x48", "#### ７２", "#### ٧٢", "#### 72\0", "\0#### 73",
    "#### seventy-two", "#### 72 apples", "#### (72)", "#### [72]", "#### **72**", "#### \\boxed{72}", "#### 72%",
    "#### 72,",
    "#### 7,2", "#### 72 = 72", "#### 144/2", "#### 70+2", "#### NaN", "#### inf", "#### -72", "#### +72", "#### $-72",
    "####",
    "#### 72<|end|>73", "#### \u202e27", "#### 7\u200b2", "#### 72\u200b", "#### 72;", "＃＃＃＃ 72", "#### 720",
    "#### 072.5",
    "#### 72.0000000000000000000000000000001", "#### 71.99999999999999999999999999999999", "#### 72 \ud800", "72",
    "#### #72",
    "<calc>#### 72</calc>", "#### <calc>72</calc>", "#### 72</s>", "ground_truth", "#### answer", "#### {answer}",
    "#### None",
)  # fmt: skip
STUFFED = ("{{stuffed}}", "{{long}}", "{{blank}}73", "{{marks}} 73", "{{marks}}", "#### {{nine}}", "#### 7{{zero}}2")


def turns() -> list[Attack]:
    """Return all hostile turns; none of them answers 72."""
    sizes = (30, 3_000, 200_000)
    sized = {
        "nine": ["9" * n for n in sizes],
        "open": ["(" * n for n in sizes],
        "close": [")" * 30],
        "minus": ["-" * n for n in sizes],
        "one": ["1" * n for n in sizes],
        "plus": ["+1" * n for n in sizes],
        "times": ["*99999" * n for n in sizes],
        "three": ["3" * n for n in sizes],
        "dots": ["." * n for n in sizes],
        "spaces": [" " * n for n in sizes],
        "calcs": ["<calc>" * n for n in sizes],
        "ends": ["</calc>" * n for n in sizes],
    }
    answers = {
        "stuffed": [" ".join(f"#### {n}" for n in range(count)) for count in (73, 100, 20_000)],
        "long": ["x" * 2**20, "#### 73" + " " * 2**20 + "x", "#### " + "1," * 100_000, "\n" * 2**20 + "#### 73"],
        "blank": ["#### " + " " * n for n in sizes],
        "marks": ["####" * n for n in sizes] + ["#### " * n for n in sizes] + ["#" * n for n in sizes],
        "nine": sized["nine"],
        "zero": ["0" * n for n in sizes],
    }
    expressions = generate("calculator", EXPRESSIONS) + generate("calculator", SIZED, **sized)
    return [
        *(Attack(attack.family, CALC.replace("{{expression}}", attack.text)) for attack in expressions),
        *generate("answers", ANSWERS),
        *generate("answers", STUFFED, **answers),
    ]
