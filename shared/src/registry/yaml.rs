//! Reading YAML with line numbers, collecting every problem instead of stopping at the first.

use marked_yaml::types::{MarkedMappingNode, MarkedScalarNode, MarkedSequenceNode};
use marked_yaml::{LoadError, LoaderOptions, Marker, Node, parse_yaml_with_options};

use super::Problem;

/// Marks a repeated key, so that the rest of the file can be read too.
const REPEATED: char = '\u{e000}';
const MAX_REPEATED: usize = 100;

/// A value with the line that it stands on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Located<T> {
    /// The line, from 1.
    pub line: usize,
    /// The value.
    pub value: T,
}

/// Reads nodes and keeps what is wrong with them.
#[derive(Default)]
pub(super) struct Reader {
    pub(super) problems: Vec<Problem>,
}

pub(super) fn line(node: &Node) -> usize {
    node.span().start().map_or(1, Marker::line)
}

fn scalar_line(node: &MarkedScalarNode) -> usize {
    node.span().start().map_or(1, Marker::line)
}

/// Nothing at all, as after `key:`. The library places it on the line of what follows, so whoever knows the key
/// reports it, and reading it as a value stays silent.
fn is_blank(node: &Node) -> bool {
    node.as_scalar().is_some_and(|scalar| scalar.may_coerce() && scalar.as_str().is_empty())
}

impl Reader {
    pub(super) fn problem(&mut self, line: usize, message: impl Into<String>) {
        self.problems.push(Problem { line, message: message.into() });
    }

    /// The document's top-level mapping. Each repeated key is a problem, its second value is not looked at.
    pub(super) fn document(&mut self, yaml: &str) -> Option<Node> {
        let mut text = yaml.to_owned();
        for _ in 0..MAX_REPEATED {
            let options = LoaderOptions::default().error_on_duplicate_keys(true).prevent_coercion(true);
            match parse_yaml_with_options(0, &text, options) {
                Ok(node) => return Some(node),
                Err(LoadError::DuplicateKey(repeated)) => {
                    let (first, key) = (scalar_line(&repeated.prev_key), scalar_line(&repeated.key));
                    self.problem(key, format!("{} stands here and on line {first}", repeated.key.as_str()));
                    text = mark_repeated(&text, &repeated.key)?;
                }
                Err(error) => {
                    let (line, message) = describe(&error);
                    self.problem(line, message);
                    return None;
                }
            }
        }
        None
    }

    pub(super) fn mapping<'n>(&mut self, node: &'n Node, what: &str, known: &[&str]) -> Option<&'n MarkedMappingNode> {
        let Some(mapping) = node.as_mapping() else {
            self.misplaced(node, what, "a mapping");
            return None;
        };
        for (key, value) in mapping.iter() {
            let name = key.as_str();
            if is_blank(value) {
                self.problem(scalar_line(key), format!("{name} is empty"));
            }
            if !known.contains(&name) && !name.starts_with(REPEATED) {
                self.problem(scalar_line(key), format!("unknown key {name} in {what}; known are {}", known.join(", ")));
            }
        }
        Some(mapping)
    }

    /// The entries of a mapping whose keys are names.
    pub(super) fn entries<'n>(&mut self, node: &'n Node, what: &str) -> Vec<(Located<String>, &'n Node)> {
        let Some(mapping) = node.as_mapping() else {
            self.misplaced(node, what, "a mapping");
            return Vec::new();
        };
        let named = mapping.iter().filter(|(key, _)| !key.as_str().starts_with(REPEATED));
        for (key, _) in named.clone().filter(|(_, value)| is_blank(value)) {
            self.problem(scalar_line(key), format!("{} in {what} is empty", key.as_str()));
        }
        named.map(|(key, value)| (Located { line: scalar_line(key), value: key.as_str().to_owned() }, value)).collect()
    }

    fn sequence<'n>(&mut self, node: &'n Node, what: &str) -> Option<&'n MarkedSequenceNode> {
        let sequence = node.as_sequence();
        if sequence.is_none() {
            self.misplaced(node, what, "a list");
        }
        sequence
    }

    fn misplaced(&mut self, node: &Node, what: &str, expected: &str) {
        if !is_blank(node) {
            self.problem(line(node), format!("{what} must be {expected}"));
        }
    }

    /// The items of a list; blank ones are problems.
    pub(super) fn items<'n>(&mut self, node: &'n Node, what: &str) -> Vec<&'n Node> {
        let Some(sequence) = self.sequence(node, what) else { return Vec::new() };
        let (blank, items): (Vec<&Node>, Vec<&Node>) = sequence.iter().partition(|item| is_blank(item));
        for item in blank {
            self.problem(line(item), format!("an item of {what} is empty"));
        }
        items
    }

    /// A nonempty text.
    pub(super) fn text(&mut self, node: &Node, what: &str) -> Option<Located<String>> {
        let line = line(node);
        let Some(scalar) = node.as_scalar() else {
            self.problem(line, format!("{what} must be a text"));
            return None;
        };
        if is_blank(node) {
            return None;
        }
        let nothing = scalar.may_coerce() && matches!(scalar.as_str(), "~" | "null" | "Null" | "NULL");
        if nothing || scalar.as_str().trim().is_empty() {
            self.problem(line, format!("{what} is empty"));
            return None;
        }
        Some(Located { line, value: scalar.as_str().to_owned() })
    }

    pub(super) fn boolean(&mut self, node: &Node, what: &str) -> Option<bool> {
        let value = node.as_scalar().and_then(MarkedScalarNode::as_bool);
        if value.is_none() {
            self.misplaced(node, what, "true or false");
        }
        value
    }

    /// A list of different texts.
    pub(super) fn texts(&mut self, node: &Node, what: &str, one: &str) -> Vec<Located<String>> {
        let mut texts: Vec<Located<String>> = Vec::new();
        for item in self.items(node, what) {
            let Some(text) = self.text(item, one) else { continue };
            if texts.iter().any(|other| other.value == text.value) {
                self.problem(text.line, format!("{what} names {} twice", text.value));
            } else {
                texts.push(text);
            }
        }
        texts
    }
}

/// The text with a repeated key made another one; `None` when the key is not where it is said to be.
fn mark_repeated(text: &str, key: &MarkedScalarNode) -> Option<String> {
    let character = key.span().start()?.character();
    let mut at = text.char_indices().nth(character)?.0;
    if text[at..].starts_with(['"', '\'']) {
        at += 1;
    }
    let stands = key.as_str().chars().next().is_some_and(|first| text[at..].starts_with(first));
    stands.then(|| format!("{}{REPEATED}{}", &text[..at], &text[at..]))
}

fn describe(error: &LoadError) -> (usize, String) {
    match error {
        LoadError::TopLevelMustBeMapping(at) | LoadError::TopLevelMustBeSequence(at) => {
            (at.line().max(1), "the file must be a mapping with tables, scopes and assignments".to_owned())
        }
        LoadError::UnexpectedAnchor(at) => (at.line(), "anchors are not supported".to_owned()),
        LoadError::MappingKeyMustBeScalar(at) => (at.line(), "a key must be a text".to_owned()),
        LoadError::UnexpectedTag(at) => (at.line(), "tags are not supported".to_owned()),
        LoadError::ScanError(at, _) => {
            let whole = error.to_string();
            // The library writes the position before the reason; the line is ours already.
            let reason = whole.split_once(": ").map_or(whole.as_str(), |(_, reason)| reason);
            (at.line().max(1), format!("not YAML: {reason}"))
        }
        LoadError::DuplicateKey(repeated) => (scalar_line(&repeated.key), "a key stands twice".to_owned()),
    }
}
