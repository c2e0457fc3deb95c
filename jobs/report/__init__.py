"""Pages that a browser opens: runs as their records show them, as HTML that needs no network.

charts.py                                   templates/*.json, filled: charts as Vega-Lite describes them
page.py, curves.py, comparison.py, costs.py records -> what a page shows
rendering.py                                that, templates/*.html, style.css, page.js and Vega itself -> one file
"""
