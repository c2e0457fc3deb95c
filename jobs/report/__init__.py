"""Pages that one opens: runs as their records tell of them, as HTML that needs no network.

curves.py, charts.py, comparison_charts.py  records -> charts, as Vega-Lite describes them
page.py, comparison.py                      records -> what stands on a page
rendering.py                                that, templates/, style.css, page.js and Vega itself (vega.py) -> one file
"""
