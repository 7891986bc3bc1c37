//! The HTML page of the dashboard; its HTML, script and style sheet are embedded in the executable.
use crate::access::Token;

/// The HTML of the dashboard's page, in which `{head}` and `{body}` are placeholders for the
/// elements that load or contain the style, the script and the data.
const HTML: &str = include_str!("page/index.html");
/// The JavaScript of the dashboard's page, wrapped in one function so that its names are not
/// global. All texts from runs are written as text nodes, never as markup.
pub(crate) const SCRIPT: &str = concat!(
    "\"use strict\";\n(() => {\n",
    include_str!("page/elements.js"),
    include_str!("page/numbers.js"),
    include_str!("page/state.js"),
    include_str!("page/curves.js"),
    include_str!("page/summary.js"),
    include_str!("page/ranks.js"),
    include_str!("page/events.js"),
    include_str!("page/logs.js"),
    include_str!("page/plan.js"),
    include_str!("page/page.js"),
    "})();\n",
);
/// The style sheet (CSS) of the dashboard's page.
pub(crate) const STYLE: &str = include_str!("page/style.css");
/// The icon of the dashboard's page, as SVG.
pub(crate) const ICON: &str = include_str!("page/favicon.svg");

/// Formats the HTML of the page of a running dashboard, which loads its script, its style sheet and
/// the data of runs from the dashboard's server.
pub(crate) fn format_live_page(token: &Token) -> String {
    let token = token.as_str();
    let head = format!(
        r#"<link rel="icon" href="favicon.svg?token={token}"><link rel="stylesheet" href="style.css?token={token}">"#
    );
    fill_page_template(&head, &format!(r#"<script src="app.js?token={token}"></script>"#))
}

/// Formats a self-contained HTML page, which includes the script, the style sheet, and the data of
/// runs in `data` (JSON text). Browsers run only the script with `nonce`, and load nothing.
pub(crate) fn format_static_page(nonce: &str, data: &str) -> String {
    let policy = format!("default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'");
    let head = format!(
        r#"<meta http-equiv="Content-Security-Policy" content="{policy}"><style nonce="{nonce}">{STYLE}</style>"#
    );
    // The data has no `<`, so that no text in it can end the element.
    let data = data.replace('<', "\\u003c");
    let body = format!(
        r#"<script type="application/json" id="data">{data}</script><script nonce="{nonce}">{SCRIPT}</script>"#
    );
    fill_page_template(&head, &body)
}

/// Inserts the HTML elements `head` and `body` at the placeholders in the HTML template of the
/// dashboard's page, and returns the page.
fn fill_page_template(head: &str, body: &str) -> String {
    let (before, rest) = HTML.split_once("{head}").unwrap_or((HTML, ""));
    let (middle, after) = rest.split_once("{body}").unwrap_or((rest, ""));
    [before, head, middle, body, after].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_writes_texts_only() {
        for name in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
            assert!(!SCRIPT.contains(name), "{name}");
        }
        for text in [HTML, SCRIPT, STYLE] {
            assert!(!text.contains("http:") && !text.contains("https:"), "nothing is loaded from elsewhere");
        }
        assert!(!SCRIPT.contains("</script") && !STYLE.contains("</style"));
        assert!(!HTML.contains(" style=") && !HTML.contains(" on"), "the policy forbids these attributes");
    }

    #[test]
    fn both_pages_are_complete() {
        let live = format_live_page(&Token::create().expect("random"));
        assert!(live.contains("app.js?token=") && live.trim_end().ends_with("</html>"));
        let page = format_static_page("n", r#"{"a":"</script><script>alert(1)</script>"}"#);
        assert!(page.contains(r#"{"a":"\u003c/script>\u003cscript>alert(1)"#) && page.contains(STYLE));
        assert_eq!(page.matches("<script").count(), 2);
        assert!(page.trim_end().ends_with("</html>"));
    }
}
