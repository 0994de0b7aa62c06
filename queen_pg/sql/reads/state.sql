-- What is installed: the revision of the tables, and the fingerprint of the set of functions.
select version_num as revision, queen._function_set() as function_set
from queen.alembic_version
