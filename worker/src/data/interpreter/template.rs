//! [`CompiledTemplate`]: renders a chat as text, and finds the assistant's replies in the text.
//!
//! A template is Jinja with the settings of `transformers`: `trim_blocks`, `lstrip_blocks`,
//! `raise_exception`, the methods of Python's strings, and `tojson` with Python's spacing.
//! `strftime_now` is not available, because the output must not depend on the date.
//!
//! A template with the generation tags `{% generation %}` and `{% endgeneration %}` encloses the
//! assistant's replies in them. A template without these tags is rendered twice more for each
//! reply: once with the messages up to and including the reply, and once with only the messages
//! before it, followed by the generation prompt. The reply is the difference of the two texts. The
//! record is rejected if these texts are not prefixes of the whole text.
use crate::data::{
    chat_record::ChatRecord,
    error::{ChatProblem, TemplateFailure},
    loss_masked_text::LossMaskedText,
};
use jobspec::LossTargets;
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig, value::Kwargs};
use regex::Regex;
use std::collections::BTreeMap;

/// Largest number of template instructions that one rendering may execute. A rendering that needs
/// more fails, so that endless loops end.
const MAX_INSTRUCTIONS: u64 = 10_000_000;
/// Deepest nesting of lists and objects that the template filter `tojson` writes.
const MAX_JSON_DEPTH: usize = 500;
/// The private-use Unicode character that a chat template outputs instead of the tag `{% generation
/// %}`, to mark the start of text that counts for the loss. A chat that contains the character is
/// rejected.
const GENERATION_BEGIN: char = '\u{F70A1}';
/// The private-use Unicode character that a chat template outputs instead of the tag `{%
/// endgeneration %}`, to mark the end of text that counts for the loss. A chat that contains the
/// character is rejected.
const GENERATION_END: char = '\u{F70A2}';
/// The name under which the chat template is registered in the template engine.
const TEMPLATE_NAME: &str = "chat";

/// A compiled chat template, with the special tokens that are available to the template.
pub(crate) struct CompiledTemplate {
    environment: Environment<'static>,
    /// Texts of the special tokens by the names that templates use, such as `eos_token`.
    special_tokens: Value,
    has_generation_tags: bool,
}

impl CompiledTemplate {
    /// Compiles a chat template from its source text. `special_tokens` are pairs of name and text.
    pub(crate) fn new(source: &str, special_tokens: &[(&str, &str)]) -> Result<Self, TemplateFailure> {
        let (template, has_generation_tags) = replace_generation_tags(source);
        let environment = compile_template(template).map_err(|e| to_template_failure(&e))?;
        let special_tokens: BTreeMap<String, String> =
            special_tokens.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect();
        Ok(CompiledTemplate { environment, special_tokens: special_tokens.into(), has_generation_tags })
    }

    /// Renders a chat as text, and determines which ranges of the text count for the loss. Fails if
    /// the messages are invalid, the template fails, or the assistant has no text although only its
    /// text counts.
    pub(crate) fn render_chat(
        &self,
        chat: &ChatRecord,
        loss_on: LossTargets,
    ) -> Result<LossMaskedText, ChatProblem> {
        let messages = validate_messages(&chat.messages)?;
        let rendered = self.render_messages(chat, &messages, false)?;
        let masked = match loss_on {
            LossTargets::All => {
                let text: String =
                    rendered.chars().filter(|&c| c != GENERATION_BEGIN && c != GENERATION_END).collect();
                let whole = 0..text.len();
                return Ok(LossMaskedText { text, loss_ranges: vec![whole] });
            }
            LossTargets::Assistant if self.has_generation_tags => extract_marked_ranges(&rendered)?,
            LossTargets::Assistant => self.locate_replies_by_rerendering(chat, &messages, rendered)?,
        };
        match masked.loss_ranges.iter().any(|r| !r.is_empty()) {
            true => Ok(masked),
            false => Err(ChatProblem::NoAssistantText),
        }
    }

    /// Renders the first messages of a chat, or all of them, as text with this chat template.
    /// Generation tags are rendered as [`GENERATION_BEGIN`] and [`GENERATION_END`]. If
    /// `add_generation_prompt` is set, the template also appends the generation prompt, after which
    /// a reply of the assistant would begin.
    fn render_messages(
        &self,
        chat: &ChatRecord,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatProblem> {
        let context = context! {
            messages => messages,
            tools => chat.tools.clone(),
            documents => Value::from(()),
            add_generation_prompt => add_generation_prompt,
            ..self.special_tokens.clone()
        };
        let failed = |e: Error| ChatProblem::Template(to_template_failure(&e));
        self.environment.get_template(TEMPLATE_NAME).and_then(|t| t.render(context)).map_err(failed)
    }

    /// Finds the byte ranges of the assistant's replies in `text`, the rendered chat, by rendering
    /// shorter versions of the chat. Renders the chat twice for each such message: with the
    /// messages before it, and with the messages up to and including it. Fails if these texts are
    /// not prefixes of `text`.
    fn locate_replies_by_rerendering(
        &self,
        chat: &ChatRecord,
        messages: &[Value],
        text: String,
    ) -> Result<LossMaskedText, ChatProblem> {
        let mut loss_ranges = Vec::new();
        for (i, message) in messages.iter().enumerate() {
            if read_message_role(message).as_deref() != Some("assistant") {
                continue;
            }
            let before = self.render_messages(chat, &messages[..i], true)?;
            let after = self.render_messages(chat, &messages[..=i], false)?;
            if !(text.starts_with(&after) && after.starts_with(&before)) {
                return Err(ChatProblem::TargetsAmbiguous { message: i + 1 });
            }
            loss_ranges.push(before.len()..after.len());
        }
        Ok(LossMaskedText { text, loss_ranges })
    }
}

/// Compiles a chat template in a new template engine with the syntax options, filters and functions
/// that `transformers` provides to templates.
fn compile_template(template: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(MAX_INSTRUCTIONS));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_filter("tojson", format_json_filter);
    environment.add_template("generation", "\u{F70A1}")?;
    environment.add_template("endgeneration", "\u{F70A2}")?;
    environment.add_template_owned(TEMPLATE_NAME, template)?;
    Ok(environment)
}

/// Checks that the messages of a chat can be rendered, and returns them as a list. Fails if `value`
/// is not a list, the list is empty, a message has no role, or a message contains a reserved
/// character.
fn validate_messages(value: &Value) -> Result<Vec<Value>, ChatProblem> {
    let Ok(items) = value.try_iter() else { return Err(ChatProblem::MessagesNotAList) };
    let items: Vec<Value> = items.collect();
    if value.as_str().is_some() {
        return Err(ChatProblem::MessagesNotAList);
    }
    if items.is_empty() {
        return Err(ChatProblem::NoMessages);
    }
    for (i, message) in items.iter().enumerate() {
        if read_message_role(message).is_none() {
            return Err(ChatProblem::RoleMissing { message: i + 1 });
        }
        if contains_generation_mark(message) {
            return Err(ChatProblem::ReservedCharacter { message: i + 1 });
        }
    }
    Ok(items)
}

/// Returns the role of a chat message, such as `user`, or `None` if the message has no text `role`.
fn read_message_role(message: &Value) -> Option<String> {
    message.get_attr("role").ok()?.as_str().map(str::to_owned)
}

/// Returns whether a chat message contains one of the private-use characters that mark generation
/// tags in rendered text.
fn contains_generation_mark(value: &Value) -> bool {
    value.to_string().contains([GENERATION_BEGIN, GENERATION_END])
}

/// Replaces the tags `{% generation %}` and `{% endgeneration %}` of a chat template by `{% include
/// %}` tags that output marker characters. The includes keep the white space control of the tags.
/// Returns the new template, and whether the old one had generation tags.
fn replace_generation_tags(source: &str) -> (String, bool) {
    // The pattern is constant, and a test compiles it.
    let Ok(tag) = Regex::new(r"\{%([-+]?)\s*(generation|endgeneration)\s*([-+]?)%\}") else {
        return (source.to_owned(), false);
    };
    let replaced = tag.replace_all(source, r#"{%$1 include "$2" $3%}"#);
    let has_tags = matches!(replaced, std::borrow::Cow::Owned(_));
    (replaced.into_owned(), has_tags)
}

/// Removes the characters that mark generation tags from rendered text, and returns the text with
/// the ranges that the tags enclosed.
fn extract_marked_ranges(rendered: &str) -> Result<LossMaskedText, ChatProblem> {
    let mut text = String::with_capacity(rendered.len());
    let (mut loss_ranges, mut open) = (Vec::new(), None);
    for c in rendered.chars() {
        match (c, open) {
            (GENERATION_BEGIN, None) => open = Some(text.len()),
            (GENERATION_END, Some(from)) => {
                loss_ranges.push(from..text.len());
                open = None;
            }
            (GENERATION_BEGIN | GENERATION_END, _) => return Err(ChatProblem::UnpairedGenerationTags),
            _ => text.push(c),
        }
    }
    match open {
        None => Ok(LossMaskedText { text, loss_ranges }),
        Some(_) => Err(ChatProblem::UnpairedGenerationTags),
    }
}

/// Converts an error of the template engine to a [`TemplateFailure`] with its message and line. The
/// result has a line number only if the error is in the chat template.
fn to_template_failure(e: &Error) -> TemplateFailure {
    TemplateFailure {
        is_endless: e.kind() == ErrorKind::OutOfFuel,
        detail: e.detail().map_or_else(|| e.kind().to_string(), str::to_owned),
        line: e.line().filter(|_| e.name() == Some(TEMPLATE_NAME)),
    }
}

/// Implements the template filter `tojson` as in `transformers`, with the spacing of Python's
/// `json.dumps` and without escaped HTML.
fn format_json_filter(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = String::new();
    append_json(&value, indent, 0, &mut out)?;
    Ok(out)
}

/// Appends the value of a template expression to the string `out` as JSON text. `indent` is the
/// number of spaces per level, or `None` for one line. `depth` is the number of enclosing lists and
/// objects.
fn append_json(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) -> Result<(), Error> {
    use minijinja::value::ValueKind;
    let unsupported =
        |what: &str| Error::new(ErrorKind::BadSerialization, format!("{what} has no JSON form"));
    let line = |depth: usize, out: &mut String| {
        if let Some(n) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    if depth > MAX_JSON_DEPTH {
        return Err(unsupported("a value with so many levels"));
    }
    let comma = if indent.is_some() { "," } else { ", " };
    let text = |s: &str| serde_json::to_string(s).map_err(|_| unsupported("text"));
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::String => out.push_str(&text(value.as_str().ok_or_else(|| unsupported("text"))?)?),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut has_items = false;
            for item in value.try_iter()? {
                out.push_str(if std::mem::replace(&mut has_items, true) { comma } else { "" });
                line(depth + 1, out);
                append_json(&item, indent, depth + 1, out)?;
            }
            if has_items {
                line(depth, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut has_items = false;
            for key in value.try_iter()? {
                out.push_str(if std::mem::replace(&mut has_items, true) { comma } else { "" });
                line(depth + 1, out);
                out.push_str(&text(&key.to_string())?);
                out.push_str(": ");
                append_json(&value.get_item(&key)?, indent, depth + 1, out)?;
            }
            if has_items {
                line(depth, out);
            }
            out.push('}');
        }
        other => return Err(unsupported(&other.to_string())),
    }
    Ok(())
}
