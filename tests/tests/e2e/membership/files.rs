//! Files of a test, in a directory that goes away with it.

use std::path::PathBuf;

pub struct Files(PathBuf);

impl Files {
    pub fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("tributary-test-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&path)?;
        Ok(Self(path))
    }

    pub fn write(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.0.join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
