import re
from xml.etree import ElementTree

import pytest

from infra.architecture.__main__ import EVERYTHING, SVG, picture_of
from infra.architecture.drawing import draw
from infra.architecture.reading import Edge, plain, read
from infra.settings import STAGES
from jobs.contract.image_hierarchy import with_descendants
from tests.support.infra.synthesis import Templates

_NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_the_picture_is_what_the_app_gives_today() -> None:
    drawn = picture_of(EVERYTHING, title="trainyard: everything that a stage can have")
    assert SVG.read_text() == drawn, "next: python -m infra.architecture"


def test_the_picture_shows_every_stack_and_says_what_flows(templates: Templates) -> None:
    stage = {path: template for path, template in templates.items() if path.startswith("prod/")}
    words = _words(draw(read(stage), title="prod"))
    assert {path.split("/")[1] for path in stage} <= words
    assert "gaudi-multinode" in " ".join(words)
    assert any(re.fullmatch(r"network: .*subnet.*", text) for text in words)
    images = [image for root in ("cpu", "gaudi") for image in with_descendants(root)]
    assert f"ECR: {len(images)} repositories" in words
    # What the job stack reads of them: the images of each kind of job, as a push recorded them.
    assert "image: 4 repositories, 4 parameters" in words


def test_a_new_stack_and_what_it_takes_show_by_themselves() -> None:
    # GIVEN a stage to which somebody adds a stack of types that nothing here names
    templates = {
        "s/old": {
            "Description": "trainyard s: what was there",
            "Resources": {"Data": {"Type": "AWS::S3::Bucket"}},
            "Outputs": {"O": {"Value": {"Fn::GetAtt": ["Data", "Arn"]}, "Export": {"Name": "old:Data"}}},
        },
        "s/new": {
            "Description": "trainyard s: what came",
            "Resources": {
                "First": {"Type": "AWS::Brandnew::MagicBox", "Properties": {"In": {"Fn::ImportValue": "old:Data"}}},
                "Second": {"Type": "AWS::Brandnew::MagicBox"},
            },
        },
    }
    picture = read(templates)
    assert [(node.name, node.title, list(node.lines)) for node in picture.nodes] == [
        ("old", "what was there", ["S3: bucket"]),
        ("new", "what came", ["Brandnew: 2 magic boxes"]),
    ]
    assert picture.edges == [Edge(source="old", target="new", labels=["bucket"])]
    assert {"new", "what came", "old: bucket", "Brandnew: 2 magic boxes"} <= _words(draw(picture, title="s"))


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_drawn_over_anything_else(stage: str, templates: Templates) -> None:
    chosen = {path: template for path, template in templates.items() if path.startswith(f"{stage}/")}
    boxes = [
        tuple(float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        for box in ElementTree.fromstring(draw(read(chosen), title=stage)).iter(f"{_NAMESPACE}rect")
        if box.get("class") in ("box", "outside")
    ]
    assert len(boxes) >= len(chosen)
    for index, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[:index]:
            apart = x >= other_x + other_width or other_x >= x + width
            assert apart or y >= other_y + other_height or other_y >= y + height


def test_types_are_said_in_words() -> None:
    assert plain("AWS::Batch::JobQueue") == "job queue"
    assert plain("AWS::EC2::NatGateway", 2) == "2 NAT gateways"
    assert plain("AWS::Batch::SchedulingPolicy", 3) == "3 scheduling policies"
    assert plain("AWS::KMS::Key") == "KMS key"


def _words(svg: str) -> set[str]:
    return {text.text or "" for text in ElementTree.fromstring(svg).iter(f"{_NAMESPACE}text")}
