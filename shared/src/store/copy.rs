//! COPY into our own tables, sent in chunks while the server works on those before.
//!
//! Binary where every column has a form that is made here without doubt, which spares both sides the parsing; else
//! PostgreSQL's text format, whose values PostgreSQL reads itself.

use std::fmt::Write as _;
use std::pin::Pin;

use bytes::{BufMut, Bytes, BytesMut};
use deadpool_postgres::Transaction;
use futures_util::SinkExt;

use super::error::{Result, StoreError};

/// Octets sent at once.
const CHUNK: usize = 64 * 1024;
/// What a binary COPY begins with: signature, no flags, no extension.
const HEADER: &[u8] = b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0";
/// What it ends with.
const TRAILER: i16 = -1;

/// The binary form of a value that is given as PostgreSQL's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// The text itself.
    Text,
    /// `smallint`
    Int2,
    /// `integer`
    Int4,
    /// `bigint`
    Int8,
    /// `boolean`
    Boolean,
}

impl Form {
    /// The form of a column of this type, where there is one.
    pub fn of(sql_type: &str) -> Option<Self> {
        match sql_type {
            "text" | "character varying" => Some(Self::Text),
            "smallint" => Some(Self::Int2),
            "integer" => Some(Self::Int4),
            "bigint" => Some(Self::Int8),
            "boolean" => Some(Self::Boolean),
            _ => None,
        }
    }
}

/// A running COPY.
pub(super) struct Copy {
    sink: Pin<Box<tokio_postgres::CopyInSink<Bytes>>>,
    buffer: BytesMut,
    binary: bool,
    columns: i16,
    /// Whether the row that is being written has a column already; text only.
    inside: bool,
    rows: u64,
}

impl Copy {
    /// Begins a COPY of `columns` columns; `target` is the table with its columns in parentheses.
    pub async fn start(db: &Transaction<'_>, target: &str, columns: usize, binary: bool) -> Result<Self> {
        let format = if binary { " (format binary)" } else { "" };
        let statement = db.prepare_cached(&format!("copy {target} from stdin{format}")).await?;
        let sink = db.copy_in(&statement).await?;
        let mut buffer = BytesMut::with_capacity(2 * CHUNK);
        if binary {
            buffer.extend_from_slice(HEADER);
        }
        let columns = i16::try_from(columns).map_err(|_| StoreError::integrity("a table has too many columns"))?;
        Ok(Self { sink: Box::pin(sink), buffer, binary, columns, inside: false, rows: 0 })
    }

    /// Begins a row; its columns follow in order.
    pub fn begin_row(&mut self) {
        self.inside = false;
        if self.binary {
            self.buffer.put_i16(self.columns);
        }
    }

    /// A `bigint`.
    pub fn int8(&mut self, number: i64) {
        if self.binary {
            self.field(&number.to_be_bytes());
        } else {
            self.decimal(number);
        }
    }

    /// An `integer`.
    pub fn int4(&mut self, number: i32) {
        if self.binary {
            self.field(&number.to_be_bytes());
        } else {
            self.decimal(i64::from(number));
        }
    }

    /// A `smallint`.
    pub fn int2(&mut self, number: i16) {
        if self.binary {
            self.field(&number.to_be_bytes());
        } else {
            self.decimal(i64::from(number));
        }
    }

    /// A `boolean`.
    pub fn boolean(&mut self, value: bool) {
        if self.binary {
            self.field(&[u8::from(value)]);
        } else {
            self.separate();
            self.buffer.extend_from_slice(if value { b"t" } else { b"f" });
        }
    }

    /// A `bytea`.
    pub fn octets(&mut self, octets: &[u8]) {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        if self.binary {
            self.field(octets);
            return;
        }
        self.separate();
        self.buffer.reserve(3 + 2 * octets.len());
        self.buffer.extend_from_slice(b"\\\\x");
        for octet in octets {
            self.buffer.extend_from_slice(&[HEX[usize::from(octet >> 4)], HEX[usize::from(octet & 15)]]);
        }
    }

    /// SQL null.
    pub fn null(&mut self) {
        if self.binary {
            self.buffer.put_i32(-1);
        } else {
            self.separate();
            self.buffer.extend_from_slice(b"\\N");
        }
    }

    /// Text, or in the text format any value as PostgreSQL writes it.
    pub fn text(&mut self, text: &str) {
        if self.binary {
            self.field(text.as_bytes());
            return;
        }
        self.separate();
        let bytes = text.as_bytes();
        let mut start = 0;
        for (i, byte) in bytes.iter().enumerate() {
            let escape: &[u8; 2] = match byte {
                b'\\' => b"\\\\",
                b'\n' => b"\\n",
                b'\r' => b"\\r",
                b'\t' => b"\\t",
                _ => continue,
            };
            self.buffer.extend_from_slice(&bytes[start..i]);
            self.buffer.extend_from_slice(escape);
            start = i + 1;
        }
        self.buffer.extend_from_slice(&bytes[start..]);
    }

    /// A value as PostgreSQL writes it, in its column's form.
    ///
    /// # Errors
    /// The text is not of the form, which PostgreSQL's own output always is.
    pub fn value(&mut self, form: Form, text: &str) -> Result<()> {
        let refused = || StoreError::integrity("a stored column's text is not of its type");
        if !self.binary {
            self.text(text);
            return Ok(());
        }
        match form {
            Form::Text => self.text(text),
            Form::Int2 => self.int2(text.parse().map_err(|_| refused())?),
            Form::Int4 => self.int4(text.parse().map_err(|_| refused())?),
            Form::Int8 => self.int8(text.parse().map_err(|_| refused())?),
            Form::Boolean => match text {
                "t" => self.boolean(true),
                "f" => self.boolean(false),
                _ => return Err(refused()),
            },
        }
        Ok(())
    }

    /// Ends a row, and sends what has gathered.
    pub async fn end_row(&mut self) -> Result<()> {
        self.rows += 1;
        if !self.binary {
            self.buffer.extend_from_slice(b"\n");
        }
        if self.buffer.len() >= CHUNK {
            let chunk = self.buffer.split().freeze();
            self.sink.send(chunk).await?;
        }
        Ok(())
    }

    /// Ends the COPY.
    ///
    /// # Errors
    /// The server took another number of rows than were sent, or refused them.
    pub async fn finish(mut self) -> Result<()> {
        if self.binary {
            self.buffer.put_i16(TRAILER);
        }
        let chunk = self.buffer.split().freeze();
        self.sink.send(chunk).await?;
        let copied = self.sink.as_mut().finish().await?;
        if copied == self.rows {
            Ok(())
        } else {
            Err(StoreError::integrity(format!("copy wrote {copied} rows instead of {}", self.rows)))
        }
    }

    fn field(&mut self, octets: &[u8]) {
        // A field of PostgreSQL has less than 1 GB.
        self.buffer.put_i32(octets.len() as i32);
        self.buffer.extend_from_slice(octets);
    }

    fn decimal(&mut self, number: i64) {
        self.separate();
        let _ = write!(self.buffer, "{number}");
    }

    fn separate(&mut self) {
        if self.inside {
            self.buffer.extend_from_slice(b"\t");
        }
        self.inside = true;
    }
}
