"""The offered tools equal the production tools in request and response."""

import copy
import json

import pytest

from envs.sop import FAMILY
from envs.sop.domains import DOMAINS, example_tools
from envs.sop.spec import check_tools, compare, offered, parse_spec, read_specs
from mtrl.config.schema import DataConfig
from mtrl.errors import UserError


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_the_tools_equal_the_specification_field_by_field(domain):
    specs = read_specs(domain.spec)
    assert all(spec.keys() == {"name", "description", "request", "response"} for spec in specs)
    assert list(compare(offered(domain), specs)) == []
    check_tools(domain, domain.spec)


def test_there_are_ten_tools_of_customer_service():
    names = [spec["name"] for spec in offered(DOMAINS["customer_service"])]
    assert len(names) == 10
    assert names[:3] == ["validateAccount", "getAuthenticationDetails", "createSessionAndOpenTicket"]


@pytest.mark.parametrize("domain", DOMAINS.values(), ids=DOMAINS)
def test_episodes_offer_the_tools_that_were_compared(domain, by_domain):
    environment = FAMILY.environment()
    environment.reset(by_domain[domain.name][0])
    try:
        assert environment.tools == [tool.schema for tool in example_tools(domain).values()]
    finally:
        environment.close()


def change(place, value):
    def changed(tools):
        tools = copy.deepcopy(tools)
        *path, last = place
        inner = tools
        for key in path:
            inner = inner[key]
        inner[last] = value
        return tools

    return changed


REQUEST = (0, "inputSchema", "properties", "aircraft_id")
CHANGES = {
    "a tool too many": (
        lambda tools: [*tools, {"name": "fly", "inputSchema": {}}],
        "fly is specified and not offered",
    ),
    "a tool too few": (lambda tools: tools[1:], "verify_mechanical_components is offered and not specified"),
    "description": (change((0, "description"), "Wear."), "verify_mechanical_components.description: offered"),
    "type": (change((*REQUEST, "type"), "integer"), 'request.properties.aircraft_id.type: offered "string", specified'),
    "required": (change((0, "inputSchema", "required"), []), "request.required: offered"),
    "another argument": (change((0, "inputSchema", "properties", "tail"), {}), "request.properties.tail: offered null"),
    "values": (change((3, "inputSchema", "properties", "system", "enum"), ["left"]), "system.enum: offered"),
    "open": (change((0, "inputSchema", "additionalProperties"), True), "additionalProperties: offered false"),
    "response": (change((0, "outputSchema", "properties", "wear", "enum"), ["low"]), "response.properties.wear.enum"),
}


@pytest.mark.parametrize(("changed", "sentence"), CHANGES.values(), ids=CHANGES.keys())
def test_every_difference_is_found_and_refuses_the_run(changed, sentence, tmp_path):
    domain = DOMAINS["aircraft_inspection"]
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(changed(json.loads(domain.spec.read_text(encoding="utf-8")))))
    with pytest.raises(UserError, match="the tools of aircraft_inspection differ in 1 places, the first: ") as error:
        FAMILY.load(DataConfig(), 0, domain=domain.name, tools_spec=str(file))
    assert sentence in str(error.value)


def test_a_run_with_the_right_specification_continues():
    for name, domain in DOMAINS.items():
        assert FAMILY.load(DataConfig(), 0, domain=name, tools_spec=str(domain.spec)).train


def test_the_three_forms_give_the_same_specification():
    spec = {"name": "look", "description": "Look.", "request": {"type": "object"}, "response": {"type": "string"}}
    mcp = {k: spec[k] for k in ("name", "description")} | {
        "inputSchema": spec["request"],
        "outputSchema": spec["response"],
    }
    bedrock = {**mcp, "inputSchema": {"json": spec["request"]}, "outputSchema": {"json": spec["response"]}}
    openai = {"name": "look", "description": "Look.", "parameters": spec["request"]}
    assert parse_spec(mcp) == parse_spec({"toolSpec": bedrock}) == spec
    without = {key: value for key, value in spec.items() if key != "response"}
    assert parse_spec({"type": "function", "function": openai}) == parse_spec(openai) == without


def test_only_specified_responses_are_compared():
    domain = DOMAINS["order_fulfilment"]
    requests = [{key: spec[key] for key in ("name", "description", "request")} for spec in offered(domain)]
    assert list(compare(offered(domain), requests)) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not JSON"),
        ("{}", "holds no list of tools"),
        ("[]", "holds no list of tools"),
        ("[1]", "a tool without a name or a request schema"),
        ('[{"name": "x"}]', "a tool without a name or a request schema"),
        ('[{"name": "x", "name": "y"}]', "is not JSON"),
    ],
)
def test_files_without_a_specification_are_refused(text, sentence, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(UserError, match=sentence):
        read_specs(file)
    with pytest.raises(UserError, match="does not exist"):
        read_specs(tmp_path / "nowhere.json")
