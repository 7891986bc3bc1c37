//! The virtual machine that turns the opcodes of a pickle into values.
use super::error::PickleError;
use super::{BYTES_MAX, MEMO_MAX, Node, NodeIndex, Tree, VALUES_MAX, Value};
use std::collections::HashMap;

type Result<T> = std::result::Result<T, PickleError>;

/// Reads one pickle that fills `input`. `globals` lists the classes and functions that the pickle
/// may name, as `module.name`.
pub(crate) fn load(input: &[u8], globals: &[&[&'static str]]) -> Result<Tree> {
    if input.len() as u64 > BYTES_MAX {
        return Err(PickleError::TooLarge { bytes: input.len() as u64 });
    }
    let (tree, end) = load_first(input, globals)?;
    if end != input.len() {
        return Err(PickleError::TrailingData { end, size: input.len() });
    }
    Ok(tree)
}

/// Reads the pickle at the beginning of `input`; returns its values and its length in bytes.
pub(crate) fn load_first(input: &[u8], globals: &[&[&'static str]]) -> Result<(Tree, usize)> {
    let mut machine = Machine {
        input,
        at: 0,
        globals,
        stack: Vec::new(),
        marks: Vec::new(),
        nodes: Vec::new(),
        memo: HashMap::new(),
        pushed: 0,
    };
    let root = machine.run()?;
    let (at, tree) = (machine.at, Tree { nodes: machine.nodes, root });
    tree.check_depth()?;
    Ok((tree, at))
}

struct Machine<'a> {
    input: &'a [u8],
    at: usize,
    globals: &'a [&'a [&'static str]],
    stack: Vec<Value>,
    /// Heights of the stack at each mark.
    marks: Vec<usize>,
    nodes: Vec<Node>,
    memo: HashMap<u32, Value>,
    /// Values pushed so far; bounds the memory.
    pushed: usize,
}

impl<'a> Machine<'a> {
    /// Executes all opcodes up to the end of the pickle; returns the value on top of the stack.
    fn run(&mut self) -> Result<Value> {
        loop {
            let op = self.take(1)?[0];
            if op == b'.' {
                return self.pop();
            }
            self.step(op)?;
        }
    }

    fn step(&mut self, op: u8) -> Result<()> {
        match op {
            0x80 => self.protocol(),
            0x95 => self.frame(),
            b'(' => self.mark(),
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_mark().map(|_| ()),
            b'2' => self.top().and_then(|v| self.push(v)),
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => self.number(4, true),
            b'K' => self.number(1, false),
            b'M' => self.number(2, false),
            0x8a => self.long(1),
            0x8b => self.long(4),
            b'G' => self.float(),
            b'X' => self.text(4),
            0x8c => self.text(1),
            0x8d => self.text(8),
            b'T' | b'B' => self.bytes(4),
            b'U' | b'C' => self.bytes(1),
            0x8e | 0x96 => self.bytes(8),
            b'}' => self.node(Node::Dict(Vec::new())),
            b']' => self.node(Node::List(Vec::new())),
            b')' => self.node(Node::Tuple(Vec::new())),
            0x8f => self.node(Node::Set(Vec::new())),
            b't' => self.collect_mark(Node::Tuple),
            b'l' => self.collect_mark(Node::List),
            0x91 => self.collect_mark(Node::Set),
            b'd' => self.dict(),
            0x85 => self.tuple(1),
            0x86 => self.tuple(2),
            0x87 => self.tuple(3),
            b'a' => self.append(),
            b'e' | 0x90 => self.appends(),
            b's' => self.set_item(),
            b'u' => self.set_items(),
            b'q' => self.size(1).and_then(|i| self.put(i)),
            b'r' => self.size(4).and_then(|i| self.put(i)),
            0x94 => self.put(self.memo.len()),
            b'h' => self.size(1).and_then(|i| self.recall(i)),
            b'j' => self.size(4).and_then(|i| self.recall(i)),
            b'c' => self.global_from_lines(),
            0x93 => self.global_from_stack(),
            b'R' => self.reduce(),
            0x81 => self.new_object(false),
            0x92 => self.new_object(true),
            b'b' => self.build(),
            b'Q' => self.pop().and_then(|v| self.node(Node::Persistent(v))),
            opcode => Err(PickleError::UnsupportedOpcode { opcode }),
        }
    }

    /// Takes the next `n` bytes.
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let rest = &self.input[self.at..];
        let truncated = PickleError::Truncated { at: self.at, claimed: n, left: rest.len() };
        let taken = rest.get(..n).ok_or(truncated)?;
        self.at += n;
        Ok(taken)
    }

    /// Takes an unsigned little-endian number of `width` bytes.
    fn size(&mut self, width: usize) -> Result<usize> {
        let mut wide = [0u8; 8];
        wide[..width].copy_from_slice(self.take(width)?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| PickleError::SizeOverflow)
    }

    fn push(&mut self, value: Value) -> Result<()> {
        self.pushed += 1;
        if self.pushed > VALUES_MAX {
            return Err(PickleError::Limit { what: "values", limit: VALUES_MAX });
        }
        self.stack.push(value);
        Ok(())
    }

    fn node(&mut self, node: Node) -> Result<()> {
        let id = NodeIndex::try_from(self.nodes.len()).map_err(|_| PickleError::SizeOverflow)?;
        self.push(Value::Node(id))?;
        self.nodes.push(node);
        Ok(())
    }

    /// The height of the stack at the last mark. Values below it must not be taken.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Value> {
        match self.stack.len() > self.floor() {
            true => self.stack.pop().ok_or(PickleError::StackUnderflow),
            false => Err(PickleError::StackUnderflow),
        }
    }

    fn top(&self) -> Result<Value> {
        match self.stack.len() > self.floor() {
            true => self.stack.last().copied().ok_or(PickleError::StackUnderflow),
            false => Err(PickleError::StackUnderflow),
        }
    }

    /// The node on top of the stack.
    fn top_node(&mut self) -> Result<&mut Node> {
        match self.top()? {
            Value::Node(id) => self.nodes.get_mut(id as usize).ok_or(PickleError::StackUnderflow),
            _ => Err(PickleError::WrongType("adds items to a value that is not a container")),
        }
    }

    fn mark(&mut self) -> Result<()> {
        if self.marks.len() >= VALUES_MAX {
            return Err(PickleError::Limit { what: "marks", limit: VALUES_MAX });
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Takes every value above the last mark.
    fn pop_mark(&mut self) -> Result<Vec<Value>> {
        let mark = self.marks.pop().ok_or(PickleError::StackUnderflow)?;
        Ok(self.stack.split_off(mark))
    }

    fn protocol(&mut self) -> Result<()> {
        match self.take(1)?[0] {
            0..=5 => Ok(()),
            other => Err(PickleError::UnsupportedProtocol { protocol: other }),
        }
    }

    fn frame(&mut self) -> Result<()> {
        let (len, left) = (self.size(8)?, self.input.len() - self.at);
        match len <= left {
            true => Ok(()),
            false => Err(PickleError::Truncated { at: self.at, claimed: len, left }),
        }
    }

    fn number(&mut self, width: usize, signed: bool) -> Result<()> {
        let n = self.size(width)? as i64;
        self.push(Value::Int(if signed { i64::from(n as u32 as i32) } else { n }))
    }

    fn long(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        let digits = self.take(len)?;
        if len > 8 {
            return self.node(Node::BigInt);
        }
        let negative = digits.last().is_some_and(|b| b & 0x80 != 0);
        let mut wide = if negative { [0xffu8; 8] } else { [0u8; 8] };
        wide[..len].copy_from_slice(digits);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    fn float(&mut self) -> Result<()> {
        let mut wide = [0u8; 8];
        wide.copy_from_slice(self.take(8)?);
        self.push(Value::Float(f64::from_be_bytes(wide)))
    }

    fn text(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        let text =
            std::str::from_utf8(self.take(len)?).map_err(|_| PickleError::InvalidUtf8 { at: self.at })?;
        self.node(Node::Str(text.into()))
    }

    fn bytes(&mut self, width: usize) -> Result<()> {
        let len = self.size(width)?;
        self.take(len)?;
        self.node(Node::Bytes)
    }

    fn collect_mark(&mut self, make: impl Fn(Vec<Value>) -> Node) -> Result<()> {
        let values = self.pop_mark()?;
        self.node(make(values))
    }

    fn dict(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.node(Node::Dict(pair_up(&values)?))
    }

    fn tuple(&mut self, n: usize) -> Result<()> {
        let start = self
            .stack
            .len()
            .checked_sub(n)
            .filter(|&s| s >= self.floor())
            .ok_or(PickleError::StackUnderflow)?;
        let values = self.stack.split_off(start);
        self.node(Node::Tuple(values))
    }

    fn append(&mut self) -> Result<()> {
        let value = self.pop()?;
        self.add(&[value])
    }

    fn appends(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.add(&values)
    }

    fn add(&mut self, values: &[Value]) -> Result<()> {
        match self.top_node()? {
            Node::List(list) | Node::Set(list) => {
                list.extend_from_slice(values);
                Ok(())
            }
            _ => Err(PickleError::WrongType("appends to a value that is not a list")),
        }
    }

    fn set_item(&mut self) -> Result<()> {
        let value = self.pop()?;
        let key = self.pop()?;
        self.set(&[key, value])
    }

    fn set_items(&mut self) -> Result<()> {
        let values = self.pop_mark()?;
        self.set(&values)
    }

    fn set(&mut self, values: &[Value]) -> Result<()> {
        match self.top_node()? {
            Node::Dict(pairs) => {
                pairs.extend(pair_up(values)?);
                Ok(())
            }
            _ => Err(PickleError::WrongType("sets items of a value that is not a dict")),
        }
    }

    fn put(&mut self, index: usize) -> Result<()> {
        let value = self.top()?;
        let index = u32::try_from(index).map_err(|_| PickleError::SizeOverflow)?;
        self.memo.insert(index, value);
        match self.memo.len() > MEMO_MAX {
            true => Err(PickleError::Limit { what: "memo entries", limit: MEMO_MAX }),
            false => Ok(()),
        }
    }

    fn recall(&mut self, index: usize) -> Result<()> {
        let known = u32::try_from(index).ok().and_then(|i| self.memo.get(&i).copied());
        self.push(known.ok_or(PickleError::UnknownMemoEntry { index })?)
    }

    fn line(&mut self) -> Result<&'a str> {
        let rest = &self.input[self.at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else {
            return Err(PickleError::UnterminatedName { at: self.at });
        };
        self.at += end + 1;
        std::str::from_utf8(&rest[..end]).map_err(|_| PickleError::InvalidUtf8 { at: self.at })
    }

    fn global_from_lines(&mut self) -> Result<()> {
        let (module, name) = (self.line()?, self.line()?);
        self.global(module, name)
    }

    fn global_from_stack(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let text = |v| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::Str(s) => Ok(s.to_string()),
                _ => Err(PickleError::WrongType("names a class by a value that is not text")),
            },
            _ => Err(PickleError::WrongType("names a class by a value that is not text")),
        };
        let (module, name) = (text(module)?, text(name)?);
        self.global(&module, &name)
    }

    fn global(&mut self, module: &str, name: &str) -> Result<()> {
        let known = |g: &&&'static str| {
            g.strip_prefix(module).and_then(|rest| rest.strip_prefix('.')).is_some_and(|rest| rest == name)
        };
        match self.globals.iter().flat_map(|list| list.iter()).find(known) {
            Some(global) => self.node(Node::Global(global)),
            None => {
                let shown: String =
                    format!("{module}.{name}").chars().filter(|c| !c.is_control()).take(120).collect();
                Err(PickleError::ForbiddenGlobal { name: shown })
            }
        }
    }

    /// Takes the global and the tuple of arguments of a call from the stack.
    fn call(&mut self) -> Result<(&'static str, Value)> {
        let (args, class) = (self.pop()?, self.pop()?);
        let tuple = matches!(args, Value::Node(id) if matches!(self.nodes[id as usize], Node::Tuple(_)));
        match class {
            Value::Node(id) => match self.nodes[id as usize] {
                Node::Global(class) if tuple => Ok((class, args)),
                _ => Err(PickleError::WrongType("calls a value that is not a class or function")),
            },
            _ => Err(PickleError::WrongType("calls a value that is not a class or function")),
        }
    }

    fn reduce(&mut self) -> Result<()> {
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => {
                let pairs = self.ordered_dict(args)?;
                self.node(Node::Dict(pairs))
            }
            _ => self.node(Node::Object { class, args, state: Value::None }),
        }
    }

    /// The pairs of `OrderedDict()` or `OrderedDict([[key, value], …])`.
    fn ordered_dict(&self, args: Value) -> Result<Vec<(Value, Value)>> {
        let values = |v: Value| match v {
            Value::Node(id) => match &self.nodes[id as usize] {
                Node::List(v) | Node::Tuple(v) => Some(v.as_slice()),
                _ => None,
            },
            _ => None,
        };
        const WRONG: PickleError =
            PickleError::WrongType("makes an OrderedDict from values that are not pairs");
        match values(args).ok_or(WRONG)? {
            [] => Ok(Vec::new()),
            [list] => {
                let pair = |&v: &Value| match values(v) {
                    Some(&[key, value]) => Ok((key, value)),
                    _ => Err(WRONG),
                };
                let list = values(*list).ok_or(WRONG)?;
                // a shared list could otherwise be copied many times
                match list.len() + self.pushed <= VALUES_MAX {
                    true => list.iter().map(pair).collect(),
                    false => Err(PickleError::Limit { what: "values", limit: VALUES_MAX }),
                }
            }
            _ => Err(WRONG),
        }
    }

    fn new_object(&mut self, with_keywords: bool) -> Result<()> {
        if with_keywords {
            let keywords = self.pop()?;
            let none = matches!(keywords, Value::Node(id) if matches!(&self.nodes[id as usize], Node::Dict(d) if d.is_empty()));
            if !none {
                return Err(PickleError::WrongType("makes an object with keyword arguments"));
            }
        }
        let (class, args) = self.call()?;
        match class {
            "collections.OrderedDict" => self.node(Node::Dict(Vec::new())),
            _ => self.node(Node::Object { class, args, state: Value::None }),
        }
    }

    fn build(&mut self) -> Result<()> {
        let given = self.pop()?;
        match self.top_node()? {
            Node::Object { state, .. } => {
                *state = given;
                Ok(())
            }
            // attributes of an OrderedDict, such as the module versions of a state_dict
            Node::Dict(_) => Ok(()),
            _ => Err(PickleError::WrongType("sets the state of a value that is not an object")),
        }
    }
}

fn pair_up(values: &[Value]) -> Result<Vec<(Value, Value)>> {
    let (pairs, rest) = values.as_chunks::<2>();
    match rest.is_empty() {
        true => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        false => Err(PickleError::KeyWithoutValue),
    }
}
